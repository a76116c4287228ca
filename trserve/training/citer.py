"""CITER's labels: which of both models' tokens the answer is better off with.

arXiv 2502.01976: where the tokens agree the small model's stays; where they differ, the answer is
rolled out from each of them, and the small model's stays unless only the other one leads to the
right result. The first iteration rolls out with the small model alone, the second with both,
routed by the network of the first. Every iteration trains a network from scratch.

The right result is the prompt's ``answer``; a prompt without one is judged by the large model's
own. Knows engines and labels; the network is trained elsewhere.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import torch

from trserve.training.collect import Collected, Source
from trserve.training.fit import Setting
from trserve.training.judging import result_of
from trserve.training.mlp import train_mlp
from trserve.training.prompts import TrainingPrompt
from trserve.training.report import Trained, write
from trserve.training.rollouts import RollOuts

ITERATIONS: Final = 2


def train_citer(
    source: Source, prompts: Sequence[TrainingPrompt], collected: Collected, setting: Setting
) -> Trained:
    """The network after ``ITERATIONS``."""
    wanted = [
        result_of(answer.text if prompt.answer is None else prompt.answer)
        for prompt, answer in zip(prompts, collected.answers, strict=True)
    ]
    trained: Trained | None = None
    for iteration in range(ITERATIONS):
        setting.say(f"iteration {iteration + 1} of {ITERATIONS}")
        right = _preferences(source, collected, wanted, trained, setting)
        trained = train_mlp("citer", collected.dataset, right, setting)
    assert trained is not None
    return trained


def _preferences(
    source: Source,
    collected: Collected,
    wanted: Sequence[str],
    trained: Trained | None,
    setting: Setting,
) -> torch.Tensor:
    """float32 [N]: 1 where the small model's token may stay."""
    dataset = collected.dataset
    rows = dataset.differs.nonzero().flatten()
    hopes = [wanted[request] for request in dataset.request[rows].tolist()]
    with ExitStack() as stack:
        router, config = "none", {}
        if trained is not None:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="trserve-")))
            write(trained, directory)
            router, config = "citer", {"checkpoint": str(directory)}
        rolls = RollOuts(source, stack.enter_context(source.engine(router, config)), collected)
        own, peer = (
            rolls.results(rows, tokens[rows], setting.say)
            for tokens in (dataset.tokens, dataset.peer_tokens)
        )
    return preferred(dataset.differs, hopes, own, peer)


def preferred(
    differs: torch.Tensor, wanted: Sequence[str], own: Sequence[str], peer: Sequence[str]
) -> torch.Tensor:
    """float32 [N]: 1 but where the tokens differ and only the large model's leads to the result.

    Args:
        differs: [N]; the others name one result for each row where it is 1, in their order.
    """
    right = torch.ones(len(differs))
    results = zip(wanted, own, peer, strict=True)
    right[differs.bool()] = torch.tensor([float(o == w or p != w) for w, o, p in results])
    return right
