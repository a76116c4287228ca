"""How much work one grammar may make: the same limits where it is checked and where it is followed.

Knows the library's matchers and a clock; nothing of tokenizers, requests or what grammars mean.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

LEXER_FUEL: Final = 100_000
"""A tenth of the library's own. Whoever shares a step with a grammar waits for its masks: to begin
``a{1000}{1000}`` takes half a second with the library's, and a twentieth of that with this.
Schemas, long texts and thousands of choices need less."""

WRITTEN: Final = "written-in-lark"
"""The name, within a grammar's text, of a part whose rules the client wrote."""

WRITTEN_ITEMS: Final = 8_000
"""Of the parser, in one step, where rules are the client's. Ambiguous ones (``x: x x | "a" |``)
take some microseconds an item, and more of them with each token."""

SCHEMA_ITEMS: Final = 50_000
"""The library's own. An object of 300 members that may all be left out takes more than 10,000, in
half a millisecond; rules made from schemas, expressions and choices are not ambiguous."""

MAX_GRAMMAR_BYTES: Final = 1 << 20
"""Of a grammar's text, which compresses well: a thousandth of it may be what is sent."""

CALL_S: Final = 0.05
MEAN_S: Final = 0.005
TOKEN_S: Final = 2e-5
"""Forty times what JSON takes for a token of a row that a worker meets for the first time."""


def new_matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher at the beginning of ``grammar``; one that is none makes it an error state."""
    from llguidance import LLMatcher, LLParserLimits

    # By its text: who writes this name into a schema gets the narrower limit, and no harm is done.
    items = WRITTEN_ITEMS if f'"name": "{WRITTEN}"' in grammar else SCHEMA_ITEMS
    limits = LLParserLimits(initial_lexer_fuel=LEXER_FUEL, step_max_items=items)
    return LLMatcher(tokenizer, grammar, log_level=0, limits=limits)


class TimeBudget:
    """What following one grammar may take of the thread that computes for everybody.

    The library counts its work, not its time, and the same count takes 0.1 or 10 microseconds. So
    this is the last resort: up to ``CALL_S`` seconds in one call, ``MEAN_S`` in the mean of all,
    and ``TOKEN_S`` more for each token that is taken in. It is CPU time, which others' load hardly
    changes; a grammar within it has the same answers on any machine.

    Args:
        clock: seconds of CPU time of this thread.
    """

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._begun = self._limit = 0.0
        self._left = CALL_S

    def begin(self, tokens: int) -> None:
        """A call begins, in which ``tokens`` are taken in."""
        self._limit = CALL_S + TOKEN_S * tokens
        self._left += MEAN_S + TOKEN_S * tokens
        self._begun = self._clock()

    def overrun(self) -> str:
        """What this call has taken too much of, up to now; empty if it may go on."""
        taken = self._clock() - self._begun
        if taken > self._limit:
            return f"it took {taken * 1e3:.0f} ms in one step"
        if taken > self._left:
            return f"it took more than {MEAN_S * 1e3:.0f} ms a token in the mean"
        return ""

    def end(self) -> None:
        """The call is over."""
        self._left -= self._clock() - self._begun
