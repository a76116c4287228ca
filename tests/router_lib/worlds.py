"""Real routers in workers without weights, beside a plain loop that follows the rules.

The loop is ``tests.workers.fakes.reference``; what a router ought to decide is given to it as a
function of the row, written here from the algorithm and not from the code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from tests.workers.fakes import VOCAB, HashRunner, Outcome, reference, world
from trserve.router_lib.base import BaseRouter

LIMIT = 40
PROMPTS = ([3, 1, 4], [1, 5, 9, 2, 6, 5], [3], [5, 8, 9, 7, 9], [3, 2, 3, 8], [4, 6], [2, 6, 4, 3])


def sharpness(token: int) -> float:
    """By how much the logit of ``token`` exceeds the others where it is the next one."""
    return 0.5 + token % 11


class SharpRunner(HashRunner):
    """Some tokens come with more certainty than others."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(len(hidden), VOCAB)
        for row, token in enumerate(hidden[:, 0].int().tolist()):
            logits[row, token] = sharpness(token)
        return logits


Decide = Callable[[int, Sequence[int]], int]


def compare(
    router: type[BaseRouter],
    config: Mapping[str, Any],
    decide: Callable[[int, int], Decide],
    *,
    keeps: Decide | None = None,
    models: int = 2,
    entry: int = 0,
    admit: Callable[[int, int], int] | None = None,
    own: Mapping[str, float] | None = None,
    **settings: Any,
) -> list[Outcome]:
    """Asserts that all prompts, decoded together, end as the loop says; returns how.

    ``decide(seed, prompt_len)`` gives the rule for one request, ``admit(seed, prompt_len)`` the
    model that writes first; ``entry`` is the one that the request names where there is none.
    """
    expected = []
    with world(
        workers=models,
        slots=len(PROMPTS),
        router=router,
        config=config,
        runner=SharpRunner,
        **settings,
    ) as w:
        slots = []
        for seed, prompt in enumerate(PROMPTS, start=2**40):
            first = entry if admit is None else admit(seed, len(prompt))
            slots.append(
                w.submit(
                    prompt,
                    limit=LIMIT,
                    entry=entry,
                    admit=admit is not None,
                    seed=seed,
                    router=own,
                )
            )
            loop = partial(reference, prompt, limit=LIMIT, models=models, keeps=keeps, entry=first)
            outcome = loop(decide=decide(seed, len(prompt)))
            hops = outcome.hops + (first != entry)
            expected.append(Outcome(outcome.row, outcome.sources, outcome.finish, hops))
        w.run(*slots)
        assert [w.outcome(slot) for slot in slots] == expected
        w.check_nothing_held()
    return expected
