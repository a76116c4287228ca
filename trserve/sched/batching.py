"""Which requests a step takes, and how many tokens of each. Pure; knows no KV and no slab.

Decodes and short suffixes (what a handoff brings) go first, because they are what a person waits
for; prompt chunks share what the token budget leaves, first come first served. A prompt that has
waited long gets at least a quarter of the budget, so that a flood of decodes cannot starve it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Protocol, TypeVar

SHORT_SUFFIX: Final = 16
"""Rows of at most this many tokens go with the decodes, unless a step is smaller than that."""

STARVED_AFTER_NS: Final = 200_000_000
STARVED_SHARE: Final = 4


class Candidate(Protocol):
    """A runnable request."""

    @property
    def remaining(self) -> int:
        """Tokens to compute before its next token can be sampled; at least 1."""

    @property
    def runnable_since_ns(self) -> int:
        """When it became runnable (``time.monotonic_ns``)."""


C = TypeVar("C", bound=Candidate)


class Turns:
    """Who is next where there are more decodes than a step has rows.

    They take turns, so that none of them stands still in the middle of its answer until others have
    ended; with as many rows as decodes there is nothing to remember.
    """

    __slots__ = ("_next",)

    def __init__(self) -> None:
        self._next = 0

    def order(self, short: list[tuple[C, int]]) -> list[tuple[C, int]]:
        """``short`` from whoever is next."""
        at = self._next % len(short) if short else 0
        return short[at:] + short[:at]

    def took(self, count: int, of: int) -> None:
        """So many of those in the last order got a row."""
        self._next = (self._next + count) % of if count < of else 0


def _reserve(max_tokens: int) -> int:
    """Tokens of a step that a starved prompt gets."""
    return max(1, max_tokens // STARVED_SHARE)


def choose_step(
    runnable: Iterable[C],
    *,
    max_rows: int,
    max_tokens: int,
    now_ns: int,
    turns: Turns | None = None,
) -> list[tuple[C, int]]:
    """The rows of the next step, oldest first within each kind, as (request, tokens) pairs.

    At most ``max_rows`` rows and ``max_tokens`` tokens; no row of 0 tokens. A long row may be
    cut to what the budget leaves (a prompt chunk); a short one is taken whole or left. With
    ``turns`` short ones that are too many for a step take turns.
    """
    short: list[tuple[C, int]] = []
    long: list[C] = []
    total = 0
    # A short row is never cut, so each must fit a step whose reserve is taken, or it would never
    # run; in a step too small for that, every row is long and first come is first served.
    longest_short = SHORT_SUFFIX
    if max_tokens < 2 * SHORT_SUFFIX:
        longest_short = min(SHORT_SUFFIX, max_tokens - _reserve(max_tokens))
    for request in runnable:
        tokens = request.remaining
        if tokens <= longest_short:
            short.append((request, tokens))
            total += tokens
        else:
            long.append(request)
    if not long and len(short) <= max_rows and total <= max_tokens:
        return short
    starved = bool(long) and now_ns - long[0].runnable_since_ns >= STARVED_AFTER_NS
    row_limit = max_rows - starved
    token_limit = max_tokens - _reserve(max_tokens) * starved
    chosen: list[tuple[C, int]] = []
    used = 0
    for request, tokens in short if turns is None else turns.order(short):
        if len(chosen) >= row_limit or used + tokens > token_limit:
            break
        chosen.append((request, tokens))
        used += tokens
    if turns is not None and short:
        turns.took(len(chosen), len(short))
    for request in long:
        left = max_tokens - used
        if len(chosen) >= max_rows or left <= 0:
            break
        tokens = min(request.remaining, left)
        chosen.append((request, tokens))
        used += tokens
    return chosen
