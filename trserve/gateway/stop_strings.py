"""Finds stop strings in a stream of text, and withholds what may still become one.

Sees text only, in whatever pieces it comes: the result does not depend on how it was cut. Knows
nothing of tokens; whoever calls it knows which token the last piece came from.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Searches one stream for the first of several stop strings.

    The first is the one whose *last* character comes first, so that no later text could change the
    answer; of several that end together, the longest. Text that is a proper prefix of a stop is
    withheld until it can no longer become one, so no part of a stop is ever shown (unless
    ``include_in_output``, and then only once it has matched).

    Args:
        stops: non-empty strings.
        include_in_output: show the matched stop itself too.
    """

    __slots__ = ("_held", "_include", "_initials", "_matched", "_partial", "_stops")

    def __init__(self, stops: Sequence[str], *, include_in_output: bool = False) -> None:
        assert all(stops), "an empty stop string matches everywhere; requests.py refuses it"
        self._stops = tuple(dict.fromkeys(stops)) if stops else ()
        self._initials = frozenset([stop[0] for stop in self._stops])
        self._include = include_in_output
        self._matched = False
        # Invariant between pushes: `_partial[k]` is the length of the longest suffix of the text
        # so far that is a proper prefix of stop k, and `_held` the longest of these suffixes. A
        # match or a longer prefix of stop k can begin no earlier than that suffix does, so what is
        # looked at again is bounded by progress made towards the very stop that is looked for.
        self._partial = [0] * len(self._stops)
        self._held = ""

    @property
    def searches(self) -> bool:
        """Whether there is anything to look for."""
        return bool(self._stops)

    def push(self, text: str, *, may_end: bool = True) -> tuple[str, str | None]:
        """Takes the next piece.

        Args:
            may_end: whether a stop that ends within this piece is one; a stop that ends in a later
                piece may always begin here.

        Returns:
            The text that may be shown now, and the stop that this piece completed, or None. After
            a match the stream is over: what is pushed then is overshoot and is dropped.
        """
        if self._matched:
            return "", None
        if not self._held and self._initials.isdisjoint(text):
            return text, None
        return self._search(text, may_end)

    def flush(self) -> str:
        """What was withheld, at the end of a stream that no stop ended."""
        held, self._held = self._held, ""
        return held

    def _search(self, text: str, may_end: bool) -> tuple[str, str | None]:
        whole = self._held + text
        seen, partial = len(self._held), self._partial
        first: tuple[int, int] | None = None  # (end, begin) in `whole`; the least one is the match
        for k, stop in enumerate(self._stops):
            start = whole.find(stop[0], seen - partial[k])
            if start < 0:  # so there was no partial match either: one begins with that character
                continue
            begin = whole.find(stop, start) if may_end else -1
            if begin >= 0 and (first is None or (begin + len(stop), begin) < first):
                first = begin + len(stop), begin
            partial[k] = _overlap(whole, stop, start)
        if first is not None:
            return self._finish(whole, *first)
        cut = len(whole) - max(partial)
        self._held = whole[cut:]
        return whole[:cut], None

    def _finish(self, whole: str, end: int, begin: int) -> tuple[str, str]:
        self._matched = True
        self._held = ""
        return whole[: end if self._include else begin], whole[begin:end]


def _overlap(text: str, stop: str, start: int) -> int:
    """Length of the longest suffix of ``text[start:]`` that is a proper prefix of ``stop``."""
    start = max(start, len(text) - len(stop) + 1)
    while (start := text.find(stop[0], start)) >= 0:
        if stop.startswith(text[start:]):
            return len(text) - start
        start += 1
    return 0
