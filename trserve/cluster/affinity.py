"""Which group of workers gets a request: the one whose prefix cache knows most of its prompt.

A session stays where it was; a prompt goes to the group that was sent the longest prefix of it; and
neither where that group has far more to do than another. What is remembered is bounded, and only a
hint: any group can answer any request. Knows no HTTP, no clocks and no processes.

Sending by longest known prefix unless the load is uneven is the cache-aware policy of SGLang's
router (Zheng et al., 2024), here with a chain of hashes instead of a tree.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Final, Literal, NamedTuple

CHUNK_BYTES: Final = 256
"""About four KV blocks of English text; what is shorter is no prefix worth a detour."""

MOST_CHUNKS: Final = 256
MOST_KEPT: Final = 65_536
SLACK: Final = 8
EXCESS: Final = 1.5
"""A group is too busy for affinity with more than :data:`SLACK` requests beyond the idlest one, and
more than :data:`EXCESS` times the mean."""

Reason = Literal["session", "prefix", "load"]


class Choice(NamedTuple):
    """The group that gets a request, and why."""

    group: int
    reason: Reason


class Affinity:
    """Remembers what was sent where.

    Args:
        most_kept: sessions, and pieces of prompts, that are remembered; the oldest go first.
    """

    def __init__(self, most_kept: int = MOST_KEPT) -> None:
        self._most_kept = most_kept
        self._sessions: OrderedDict[int, int] = OrderedDict()
        self._prefixes: OrderedDict[int, int] = OrderedDict()

    def choose(self, in_flight: Sequence[int | None], session: str, prompt: bytes) -> Choice:
        """The group for a request; remembers it.

        Args:
            in_flight: requests that each group has to do, None for one that is away; at least one
                group is there.
            session: what the client calls its session; empty for none.
            prompt: bytes of which equal prefixes mean equal prefixes of tokens.
        """
        hashes = list(_chain(prompt))
        known = hash(session) if session else None  # a name may be as long as its client likes
        choice = self._wanted(in_flight, known, hashes)
        if choice is None:
            choice = Choice(_idlest(in_flight), "load")
        self._remember(choice.group, known, hashes)
        return choice

    def forget(self, group: int) -> None:
        """``group`` has lost what it knew."""
        _drop(self._sessions, group)
        _drop(self._prefixes, group)

    def _wanted(
        self, in_flight: Sequence[int | None], session: int | None, hashes: Sequence[int]
    ) -> Choice | None:
        known = self._sessions.get(session) if session is not None else None
        if known is not None and _has_time(in_flight, known):
            return Choice(known, "session")
        for hashed in reversed(hashes):
            group = self._prefixes.get(hashed)
            if group is not None and _has_time(in_flight, group):
                return Choice(group, "prefix")
        return None

    def _remember(self, group: int, session: int | None, hashes: Sequence[int]) -> None:
        if session is not None:
            _put(self._sessions, session, group, self._most_kept)
        for hashed in hashes:
            _put(self._prefixes, hashed, group, self._most_kept)


def _put(kept: OrderedDict[int, int], key: int, group: int, most: int) -> None:
    kept[key] = group
    kept.move_to_end(key)
    if len(kept) > most:
        kept.popitem(last=False)


def _drop(kept: OrderedDict[int, int], group: int) -> None:
    for key in [key for key, value in kept.items() if value == group]:
        del kept[key]


def _chain(prompt: bytes) -> Iterator[int]:
    """One number for each prefix of whole chunks."""
    hashed = 0
    for start in range(0, min(len(prompt), MOST_CHUNKS * CHUNK_BYTES), CHUNK_BYTES):
        chunk = prompt[start : start + CHUNK_BYTES]
        if len(chunk) < CHUNK_BYTES:
            return
        hashed = hash((hashed, chunk))
        yield hashed


def _idlest(in_flight: Sequence[int | None]) -> int:
    there = [(load, group) for group, load in enumerate(in_flight) if load is not None]
    return min(there)[1]


def _has_time(in_flight: Sequence[int | None], group: int) -> bool:
    """Whether ``group`` is there, and not much busier than the others."""
    own = in_flight[group] if group < len(in_flight) else None
    if own is None:
        return False
    there = [load for load in in_flight if load is not None]
    return own <= min(there) + SLACK or own <= EXCESS * sum(there) / len(there)
