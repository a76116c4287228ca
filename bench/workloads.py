"""What users ask: prompts as token ids and how long answers are. Knows no server.

Three lengths are those of the published figures; ``problems`` is what the embedded pair was made
for: held-out questions, answered to their natural end.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Final, NamedTuple

TOKEN_IDS: Final = 512
"""Random prompts are of ids below this; every tokenizer here has more."""
_FIRST_ID: Final = 16
_PROBLEMS: Final = 2000
_SEED: Final = 977


class Question(NamedTuple):
    """One request: its number in the run, the ids of its prompt, how many tokens it asks for."""

    number: int
    prompt: Sequence[int]
    max_tokens: int


@dataclass(frozen=True)
class Workload:
    """Prompts of ``prompt_tokens`` random ids (0: problems), answers of ``output_tokens``.

    ``ignore_eos``: answers have that length; else it is their limit.
    """

    name: str
    prompt_tokens: int
    output_tokens: int
    ignore_eos: bool = True

    def question(self, turn: int, place: int, users: int) -> Question:
        """What the user at ``place`` asks in a ``turn``; no two prompts begin alike.

        Answers of a fixed length begin staggered: in the first turn the users' answers are cut to
        different lengths, and what is cut stands in the prompt. From the first step on contexts
        are then spread as they will be after any number of turns.
        """
        number = turn * users + place
        if not self.prompt_tokens:
            prompts = problem_prompts()
            return Question(number, prompts[number % len(prompts)], self.output_tokens)
        length = self.output_tokens
        if not turn and self.ignore_eos:
            length = max(1, self.output_tokens * (place + 1) // users)
        return Question(number, self._prompt(number, self.output_tokens - length), length)

    def _prompt(self, number: int, written: int) -> Sequence[int]:
        dice = random.Random(f"{_SEED} {number}")
        ids = range(_FIRST_ID, TOKEN_IDS)
        return dice.choices(ids, k=self.prompt_tokens + written)

    def scaled(self, factor: float) -> Workload:
        """The same with shorter prompts and answers."""
        prompt = round(self.prompt_tokens * factor)
        return replace(
            self,
            prompt_tokens=max(prompt, 1) if self.prompt_tokens else 0,
            output_tokens=max(1, round(self.output_tokens * factor)),
        )


WORKLOADS: Final = {
    each.name: each
    for each in (
        Workload("low-effort", 100, 2048),
        Workload("high-effort", 100, 8192),
        Workload("agentic", 8192, 1024),
        Workload("problems", 0, 160, ignore_eos=False),
    )
}


@cache
def problem_prompts() -> Sequence[Sequence[int]]:
    """Held-out questions in the embedded pair's chat format."""
    from trserve.demo import model_path
    from trserve.demo.grammar import held_out
    from trserve.gateway.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(model_path("tiny"))
    return [
        tokenizer.encode(
            tokenizer.render_chat(
                [{"role": "user", "content": problem.question}],
                add_generation_prompt=True,
                kwargs={},
            ),
            add_special_tokens=False,
        )
        for problem in held_out(_PROBLEMS, seed=_SEED)
    ]
