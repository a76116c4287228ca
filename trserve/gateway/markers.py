"""Finding a marker in a text that comes in pieces. Knows no markers' meaning."""

from __future__ import annotations

from typing import NamedTuple


class Cut(NamedTuple):
    """A text cut at a marker.

    ``found``: ``before`` and ``after`` stand around it. Else ``after`` is the end of the text that
    may be the marker's beginning, and waits for more.
    """

    before: str
    after: str
    found: bool


def cut(text: str, marker: str) -> Cut:
    """``text`` cut at the first ``marker``, whole or begun."""
    before, found, after = text.partition(marker)
    if found:
        return Cut(before, after, True)
    for size in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:size]):
            return Cut(text[:-size], text[-size:], False)
    return Cut(text, "", False)
