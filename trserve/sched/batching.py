"""Which requests a step takes, and how many tokens of each. Pure; knows no KV and no slab.

Decodes and short suffixes (what a handoff brings) go first, because they are what a person waits
for; prompt chunks share what the token budget leaves, first come first served. A prompt that has
waited long gets at least a quarter of the budget, so that a flood of decodes cannot starve it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple, Protocol, TypeVar

SHORT_SUFFIX: Final = 16
"""Rows of at most this many tokens go with the decodes."""

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


class Share(NamedTuple):
    """How much of a step each kind of row may take."""

    short_tokens: int
    total_tokens: int


def _budget(waiting_prompt_ns: int, max_tokens: int) -> Share:
    if waiting_prompt_ns < STARVED_AFTER_NS:
        return Share(max_tokens, max_tokens)
    return Share(max_tokens - max_tokens // STARVED_SHARE, max_tokens)


def choose_step(
    runnable: Iterable[C], *, max_rows: int, max_tokens: int, now_ns: int
) -> list[tuple[C, int]]:
    """The rows of the next step, oldest first within each kind, as (request, tokens) pairs.

    At most ``max_rows`` rows and ``max_tokens`` tokens; no row of 0 tokens. A long row may be
    cut to what the budget leaves (a prompt chunk); a short one is taken whole or left.
    """
    short: list[C] = []
    long: list[C] = []
    for request in runnable:
        (short if request.remaining <= SHORT_SUFFIX else long).append(request)
    waited = now_ns - long[0].runnable_since_ns if long else 0
    share = _budget(waited, max_tokens)
    row_limit = max_rows - 1 if long and share.short_tokens < max_tokens else max_rows
    chosen: list[tuple[C, int]] = []
    used = 0
    for request in short:
        tokens = request.remaining
        if len(chosen) >= row_limit or used + tokens > share.short_tokens:
            break
        chosen.append((request, tokens))
        used += tokens
    for request in long:
        left = share.total_tokens - used
        if len(chosen) >= max_rows or left <= 0:
            break
        tokens = min(request.remaining, left)
        chosen.append((request, tokens))
        used += tokens
    return chosen
