"""How much work one grammar may make: the same limits where it is checked and where it is followed.

Knows the library's matchers; nothing of tokenizers, requests or what grammars look like.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

LEXER_FUEL: Final = 100_000
"""A tenth of the library's own. Whoever shares a step with a grammar waits for its masks: to begin
``a{1000}{1000}`` takes half a second with the library's, and a twentieth of that with this.
Schemas, long texts and thousands of choices need less."""


def new_matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher at the beginning of ``grammar``; one that is none makes it an error state."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(initial_lexer_fuel=LEXER_FUEL)
    return LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
