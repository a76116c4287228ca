"""Routers by a confidence that an MLP reads off the hidden state: CITER and the edge system's.

CITER (arXiv 2502.01976): c = sigmoid(w . MLP(h) + b) with h the last hidden state after the final
norm; the first model's token is replaced where c < tau. The edge system (arXiv 2504.07878) uses
the same rule and layout with a threshold of its own. Layout: ``mlp.0`` Linear [2h, h], ``mlp.1``
BatchNorm over 2h, ReLU, ``mlp.4`` Linear [h, 2h], ``linear`` Linear [1, h].
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear, relu

from trserve.router_lib.base import StepResult
from trserve.router_lib.checkpoints import Checkpoint, read_checkpoint
from trserve.router_lib.learned import LearnedRouter, Network
from trserve.router_lib.parameters import Parameter
from trserve.router_lib.registry import CITER_PARAMETERS, CONFIDENCE_PARAMETERS

_EPS = 1e-5
"""BatchNorm's, which the files do not state."""

_AFFINE = ("weight", "bias")
_LAYERS = ("mlp.0", "mlp.1", "mlp.4", "linear")
_STATISTICS = ("mlp.1.running_mean", "mlp.1.running_var", "mlp.1.num_batches_tracked")


class ConfidenceNetwork:
    """The MLP of a checkpoint; its BatchNorm, which runs on stored statistics, is folded."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        _, hidden = checkpoint.shape("mlp.0.weight", 2)
        wide = 2 * hidden
        weight, bias = checkpoint.linear("mlp.0", wide, hidden)
        scale, shift = (checkpoint.take(f"mlp.1.{name}", wide).double() for name in _AFFINE)
        mean, variance = (checkpoint.take(name, wide).double() for name in _STATISTICS[:2])
        factor = scale / (variance + _EPS).sqrt()
        self._first = (weight.double() * factor[:, None]).float()
        self._first_bias = ((bias.double() - mean) * factor + shift).float()
        self._second = checkpoint.linear("mlp.4", hidden, wide)
        self._last = checkpoint.linear("linear", 1, hidden)
        known = [f"{layer}.{kind}" for layer in _LAYERS for kind in _AFFINE]
        checkpoint.refuse_others([*known, *_STATISTICS], "confidence network")
        self.hidden_size = hidden

    def __call__(self, result: StepResult) -> torch.Tensor:
        """float32 [B]: the confidence in the first model."""
        wide = relu(linear(result.hidden.float(), self._first, self._first_bias))
        return linear(linear(wide, *self._second), *self._last).squeeze(-1).sigmoid_()


class Citer(LearnedRouter):
    """To the other model where the confidence is below ``tau``."""

    parameters: tuple[Parameter, ...] = CITER_PARAMETERS

    def load(self) -> Network:
        """The MLP in the named file."""
        network = ConfidenceNetwork(read_checkpoint(self.checkpoint))
        self.check_hidden_size(network.hidden_size)
        return network


class Confidence(Citer):
    """To the other model where the confidence is below ``threshold``."""

    parameters = CONFIDENCE_PARAMETERS
