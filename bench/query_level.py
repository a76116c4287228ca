"""A query-level router beside the token-level ones: which model answers, decided by the prompt.

After RouteLLM (arXiv 2406.18665): a logistic regression says how likely the small model alone is
wrong, from its last hidden state of the prompt and from the prompt's length and numbers; the
likeliest prompts go to the large model, whole. It is trained on answers to prompts of the training
generator. Knows how both models answered, not how they are asked.
"""

from __future__ import annotations

import random
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from trserve import Completion, Engine, Recording
from trserve.demo.grammar import Problem, extract_answer, training_example
from trserve.demo.tokenizer_build import messages

TRAINING_PROMPTS: Final = 3000
SEED: Final = 90_210
"""Of the training prompts; not one that problems are measured on."""
L2: Final = 1e-3
STEPS: Final = 1000
"""Over all prompts at once; far more than it needs to come to rest."""
_NUMBER: Final = re.compile(r"\d+")


class QueryRouter:
    """``scores`` says how likely the small model is wrong; fitted to what it did wrong.

    Args:
        features: float32 [N, F].
        wrong: [N], 1 where the small model alone was.
    """

    def __init__(self, features: torch.Tensor, wrong: torch.Tensor) -> None:
        self._mean, self._deviation = features.mean(0), features.std(0).clamp_min(1e-4)
        self._weight = torch.zeros(features.shape[1] + 1, requires_grad=True)
        scaled, wanted = self._scaled(features), wrong.float()
        optimiser = torch.optim.Adam([self._weight], lr=0.02)
        for _ in range(STEPS):
            optimiser.zero_grad()
            value = binary_cross_entropy_with_logits(scaled @ self._weight, wanted)
            torch.autograd.backward(value + L2 * self._weight[:-1].square().sum())
            optimiser.step()

    def scores(self, features: torch.Tensor) -> torch.Tensor:
        """float32 [N] from 0 to 1."""
        return (self._scaled(features) @ self._weight).sigmoid().detach()

    def _scaled(self, features: torch.Tensor) -> torch.Tensor:
        scaled = (features - self._mean) / self._deviation
        return torch.cat([scaled, torch.ones(len(scaled), 1)], -1)


def training_problems(count: int = TRAINING_PROMPTS) -> list[Problem]:
    """Arithmetic of one turn, as what is measured; none of it held out."""
    rng = random.Random(SEED)
    found: list[Problem] = []
    while len(found) < count:
        problem = training_example(rng)
        if problem.value is not None and not problem.history and problem.system is None:
            found.append(problem)
    return found


def small_alone(problems: Sequence[Problem], max_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Features [N, F] of the prompts, and where the small model alone answers wrong, bool [N]."""
    with tempfile.TemporaryDirectory(prefix="trserve-query-") as directory:
        settings: dict[str, Any] = {"models": ("tiny", "small"), "router": "none"}
        with Engine(**settings, record=directory, record_top_k=1) as engine:
            answers = engine.generate(
                [messages(p) for p in problems], temperature=0, max_tokens=max_tokens
            )
        assert isinstance(answers, list)
        hidden = _prompt_states(Path(directory), answers)
    simple = torch.tensor([_simple(problem.question) for problem in problems])
    wrong = [extract_answer(a.text) != p.value for a, p in zip(answers, problems, strict=True)]
    return torch.cat([hidden, simple], -1), torch.tensor(wrong)


def _prompt_states(directory: Path, answers: Sequence[Completion]) -> torch.Tensor:
    """The state from which the answer's first token was drawn: the prompt's last."""
    found = {record.request_id: record.rows(0).hidden[0] for record in Recording(directory)}
    states = [found[str(answer.request_id)] for answer in answers]
    return torch.from_numpy(np.stack(states)).float()


def _simple(question: str) -> list[float]:
    numbers = [float(number) for number in _NUMBER.findall(question)]
    return [float(len(question)), float(len(numbers)), max(numbers, default=0.0), sum(numbers)]


def scores(problems: Sequence[Problem], max_tokens: int) -> list[float]:
    """How likely the small model is wrong, for each of ``problems``, by a router trained here."""
    router = QueryRouter(*small_alone(training_problems(), max_tokens))
    features, _ = small_alone(problems, max_tokens)
    found: list[float] = router.scores(features).tolist()
    return found
