"""What users ask: prompts as token ids and how long answers are. Knows no server.

Three lengths are those of the published figures; ``problems`` is what the embedded pair was made
for: held-out questions, answered to their natural end.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

TOKEN_IDS: Final = 512
"""Random prompts are of ids below this; every tokenizer here has more."""
_FIRST_ID: Final = 16
_PROBLEMS: Final = 2000
_SEED: Final = 977


@dataclass(frozen=True)
class Workload:
    """Prompts of ``prompt_tokens`` random ids (0: problems), answers of ``output_tokens``.

    ``ignore_eos``: answers have that length; else it is their limit.
    """

    name: str
    prompt_tokens: int
    output_tokens: int
    ignore_eos: bool = True

    def prompt(self, number: int) -> Sequence[int]:
        """The ids of the ``number``-th prompt; no two begin alike."""
        if not self.prompt_tokens:
            prompts = problem_prompts()
            return prompts[number % len(prompts)]
        dice = random.Random(f"{_SEED} {number}")
        return [dice.randrange(_FIRST_ID, TOKEN_IDS) for _ in range(self.prompt_tokens)]

    def length_of(self, turn: int, number: int, users: int) -> int:
        """The length of a user's answer: the first ones are cut so that not all end together."""
        if turn or not self.ignore_eos:
            return self.output_tokens
        return max(1, self.output_tokens * (number + 1) // users)

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
