"""Gradient descent on rows in memory, with a held-out set to stop by. Knows no router.

The same seed gives the same weights on the same machine: batches are drawn from a generator of
their own, and one thread sums in one order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From logits [B] and targets [B, ...] to a mean."""
Say = Callable[[str], None]

CHECKS: Final = 10
_HELD_OUT_ROWS: Final = 8192
"""Rows of the held-out set computed at a time."""


@dataclass(frozen=True)
class Recipe:
    """How long and how fast; the rate falls along a cosine to nothing."""

    steps: int = 3000
    batch: int = 1024
    rate: float = 1e-3
    weight_decay: float = 0.01
    seed: int = 0


@dataclass(frozen=True)
class Setting:
    """What all routers are trained with.

    ``held_out``: share of the prompts that is; ``recall``: of the threshold to begin with.
    """

    recipe: Recipe = Recipe()
    held_out: float = 0.1
    recall: float = 0.95
    say: Say = lambda line: None


@dataclass(frozen=True, eq=False)
class Rows:
    """Inputs [N, F] in any precision, and targets [N, ...]."""

    inputs: torch.Tensor
    targets: torch.Tensor


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch on one thread; what it was before comes back."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def fit(
    network: nn.Module, loss: Loss, training: Rows, held: Rows, recipe: Recipe, say: Say
) -> float:
    """Train ``network`` in place and leave it, in evaluation mode, at its best on ``held``.

    Returns the loss there. Progress goes to ``say``.
    """
    optimiser = torch.optim.AdamW(
        network.parameters(), lr=recipe.rate, weight_decay=recipe.weight_decay
    )
    generator = torch.Generator().manual_seed(recipe.seed)
    best, kept = mean_loss(network, loss, held), _copy(network)
    every = max(1, recipe.steps // CHECKS)
    for step in range(recipe.steps):
        optimiser.param_groups[0]["lr"] = recipe.rate * _falling(step, recipe.steps)
        batch = torch.randint(len(training.inputs), (recipe.batch,), generator=generator)
        network.train()
        value = loss(network(training.inputs[batch].float()), training.targets[batch])
        optimiser.zero_grad()
        torch.autograd.backward(value)
        optimiser.step()
        if (step + 1) % every == 0 or step + 1 == recipe.steps:
            found = mean_loss(network, loss, held)
            say(f"step {step + 1} of {recipe.steps}: loss {value.item():.4f}, held out {found:.4f}")
            if found < best:
                best, kept = found, _copy(network)
    network.load_state_dict(kept)
    network.eval()
    return best


def _falling(step: int, steps: int) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * step / steps))


def _copy(network: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in network.state_dict().items()}


@torch.no_grad()
def outputs(network: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """float32 [N]: the logits of all ``inputs``, in evaluation mode."""
    network.eval()
    return torch.cat([network(part.float()) for part in torch.split(inputs, _HELD_OUT_ROWS)])


def mean_loss(network: nn.Module, loss: Loss, rows: Rows) -> float:
    """Over all ``rows``, in evaluation mode."""
    return float(loss(outputs(network, rows.inputs), rows.targets))
