"""The law of what a mixture ensemble writes: the weighted mean of its models' distributions.

Two models whose next token depends on the one before, at temperature 1. The first two tokens of
many requests are compared with the exact law by chi-square. The same test must reject an ensemble
whose first token is always the entry model's.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from tests.workers.fakes import VOCAB, HashRunner, world
from trserve.router_lib.base import BaseRouter
from trserve.router_lib.me import MixtureEnsemble

WEIGHTS = (0.7, 0.3)
TOKENS = 3
REQUESTS = 1500
POINT_999 = 26.12
"""The 99.9 % point of chi-squared with 8 degrees of freedom, of 9 pairs of tokens."""

TABLE = np.array(
    [
        [[0.6, 0.3, 0.1], [0.2, 0.2, 0.6], [0.5, 0.25, 0.25]],
        [[0.1, 0.2, 0.7], [0.5, 0.4, 0.1], [0.1, 0.8, 0.1]],
    ]
)
"""Probability of each token by model and by the token before."""


class TableRunner(HashRunner):
    """Logits that are the logarithms of a row of the table."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = torch.full((len(hidden), VOCAB), -torch.inf)
        before = hidden[:, 0].long()
        logits[:, :TOKENS] = torch.tensor(TABLE[self.model], dtype=torch.float32).log()[before]
        return logits


class BiasedEnsemble(MixtureEnsemble):
    """Without ``admit``: the entry model writes every first token."""

    admit = BaseRouter.admit


def statistic(router: type[BaseRouter], seed: int) -> float:
    pairs: Counter[tuple[int, ...]] = Counter()
    with world(
        router=router,
        runner=TableRunner,
        token=lambda model, row: row[-1],
        config={"weights": "/".join(map(str, WEIGHTS))},
        slots=100,
        num_blocks=512,
        max_rows=64,
        max_tokens=256,
    ) as w:
        for batch in range(0, REQUESTS, 100):
            slots = [
                w.submit([0], limit=3, temperature=1.0, eos_token_ids=(), seed=seed + batch + n)
                for n in range(100)
            ]
            w.run(*slots)
            pairs.update(tuple(w.outcome(slot).row[1:]) for slot in slots)
            for slot in slots:
                w.slots.release(slot)
            assert w.slots.collect()
    mean = np.tensordot(WEIGHTS, TABLE, axes=1)
    law = (mean[0][:, None] * mean).reshape(-1) * REQUESTS
    found = np.array([pairs[a, b] for a in range(TOKENS) for b in range(TOKENS)])
    assert found.sum() == REQUESTS
    return float(((found - law) ** 2 / law).sum())


@pytest.mark.parametrize("seed", [0, 2**33, 2**63])
def test_the_first_two_tokens_follow_the_weighted_mean(seed: int) -> None:
    assert statistic(MixtureEnsemble, seed) < POINT_999


def test_an_ensemble_that_always_begins_with_one_model_is_found_out() -> None:
    assert statistic(BiasedEnsemble, 0) > POINT_999
