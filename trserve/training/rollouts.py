"""Where a token leads: answers that are continued after another token than the one written.

Knows engines and texts; no networks.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from trserve import Engine
from trserve.gateway.tokenizer import Tokenizer
from trserve.training.collect import Collected, Say, Source
from trserve.training.judging import result_of


class RollOuts:
    """Continues the answers of ``collected`` from its rows.

    Args:
        engine: what writes the continuations.
        options: of its requests; ``trserve={"only": ...}`` for one model.
    """

    def __init__(
        self, source: Source, engine: Engine, collected: Collected, **options: Any
    ) -> None:
        self._source, self._engine, self._collected = source, engine, collected
        self._options = options
        plan = source.plan
        self._ends = set(plan.eos_token_ids)
        self._tokenizer = Tokenizer.load(Path(plan.tokenizer_path))

    def results(self, rows: torch.Tensor, tokens: torch.Tensor, say: Say) -> list[str]:
        """The result of each answer of ``rows`` (indices [R]), with ``tokens`` [R] there."""
        heads = [self._head(row, int(t)) for row, t in zip(rows.tolist(), tokens, strict=True)]
        going = [index for index, pair in enumerate(heads) if self._goes_on(*pair)]
        prompts = [list(heads[index][0]) + heads[index][1] for index in going]
        found = self._source.answer(self._engine, prompts, say, **self._options)
        texts = [self._text(head) for _, head in heads]
        for index, answer in zip(going, found, strict=True):
            texts[index] = self._text(heads[index][1] + answer.token_ids)
        return [result_of(text) for text in texts]

    def _head(self, row: int, token: int) -> tuple[Sequence[int], list[int]]:
        """Prompt, and the answer up to and with ``token``."""
        dataset = self._collected.dataset
        answer = self._collected.answers[int(dataset.request[row])]
        before = answer.token_ids[: int(dataset.position[row])]
        return answer.prompt_token_ids, [*before, token]

    def _goes_on(self, prompt: Sequence[int], head: Sequence[int]) -> bool:
        return head[-1] not in self._ends and len(prompt) + len(head) < self._source.context

    def _text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)


def divergent(source: Source, collected: Collected, say: Say) -> torch.Tensor:
    """float32 [N]: 1 where the small model's token changes what the large one comes to.

    R2R's notion: where the tokens differ, the large model goes on after the small one's; where it
    ends in the same result the difference is neutral.
    """
    dataset = collected.dataset
    rows = dataset.differs.nonzero().flatten()
    only = {"only": source.plan.models[1].name}
    with source.engine("none", {}) as engine:
        rolls = RollOuts(source, engine, collected, trserve=only)
        found = rolls.results(rows, dataset.tokens[rows], say)
    own = [result_of(answer.text) for answer in collected.answers]
    labels = torch.zeros(len(dataset))
    requests = dataset.request[rows].tolist()
    changed = [result != own[r] for result, r in zip(found, requests, strict=True)]
    labels[rows] = torch.tensor(changed, dtype=torch.float32)
    return labels
