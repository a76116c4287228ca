"""Routers by a confidence that an MLP reads off the hidden state: CITER and the edge system's.

CITER (arXiv 2502.01976): c = sigmoid(w . MLP(h) + b) with h the last hidden state after the final
norm; the first model's token is replaced where c < tau. The edge system (arXiv 2504.07878) uses
the same rule and layout with a threshold of its own, and with ``tap=pre-mlp`` the input that it was
trained on: what the last layer's MLP reads. Layout: ``mlp.0`` Linear [2h, h], ``mlp.1``
BatchNorm over 2h, ReLU, ``mlp.4`` Linear [h, 2h], ``linear`` Linear [1, h]. A converted file has no
``mlp.1``: it is folded already.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear, relu

from trserve.router_lib.base import StepResult
from trserve.router_lib.checkpoints import Checkpoint, find_file, read_checkpoint
from trserve.router_lib.learned import LearnedRouter, Network, as_threshold
from trserve.router_lib.parameters import Parameter
from trserve.router_lib.registry import (
    CITER_PARAMETERS,
    CONFIDENCE_PARAMETERS,
    FINAL,
    PRE_MLP,
    TAP,
)

_EPS = 1e-5
"""BatchNorm's, which the files do not state."""

_AFFINE = ("weight", "bias")
_LAYERS = ("mlp.0", "mlp.1", "mlp.4", "linear")
_NORM = "mlp.1.weight"
_STATISTICS = ("mlp.1.running_mean", "mlp.1.running_var", "mlp.1.num_batches_tracked")


FILES = ("citer.safetensors", "confidence.safetensors")
"""What a folder may hold."""


class ConfidenceNetwork:
    """The MLP of a checkpoint; its BatchNorm, which runs on stored statistics, is folded."""

    def __init__(self, checkpoint: Checkpoint, *, reads_tap: bool = False) -> None:
        self._reads_tap = reads_tap
        _, hidden = checkpoint.shape("mlp.0.weight", 2)
        wide = 2 * hidden
        layers = _LAYERS if _NORM in checkpoint else [n for n in _LAYERS if n != "mlp.1"]
        statistics = _STATISTICS if "mlp.1" in layers else ()
        self._first = checkpoint.linear("mlp.0", wide, hidden)
        if statistics:
            self._first = _folded(checkpoint, self._first)
        self._second = checkpoint.linear("mlp.4", hidden, wide)
        self._last = checkpoint.linear("linear", 1, hidden)
        known = [f"{layer}.{kind}" for layer in layers for kind in _AFFINE]
        checkpoint.refuse_others([*known, *statistics], "confidence network")
        self.hidden_size = hidden

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """What a converted file holds, in float32."""
        parts = {"mlp.0": self._first, "mlp.4": self._second, "linear": self._last}
        return {
            f"{layer}.{kind}": tensor
            for layer, pair in parts.items()
            for kind, tensor in zip(_AFFINE, pair, strict=True)
        }

    def to(self, device: torch.device) -> None:
        """Move all weights."""
        layers = (self._first, self._second, self._last)
        self._first, self._second, self._last = (
            (weight.to(device), bias.to(device)) for weight, bias in layers
        )

    def __call__(self, result: StepResult) -> torch.Tensor:
        """float32 [B]: the confidence in the first model."""
        state = result.tap if self._reads_tap else result.hidden
        assert state is not None
        wide = relu(linear(state.float(), *self._first))
        return linear(linear(wide, *self._second), *self._last).squeeze(-1).sigmoid_()


def _folded(
    checkpoint: Checkpoint, first: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The layer that applies ``first``, then the BatchNorm; products in float64."""
    weight, bias = first
    wide = len(bias)
    scale, shift = (checkpoint.take(f"mlp.1.{name}", wide).double() for name in _AFFINE)
    mean, variance = (checkpoint.take(name, wide).double() for name in _STATISTICS[:2])
    factor = scale / (variance + _EPS).sqrt()
    folded = (weight.double() * factor[:, None]).float()
    return folded, ((bias.double() - mean) * factor + shift).float()


class Citer(LearnedRouter):
    """To the other model where the confidence is below ``tau``."""

    parameters: tuple[Parameter, ...] = CITER_PARAMETERS
    capturable = True
    usual = 0.95

    def load(self) -> Network:
        """The MLP in the named file; the threshold too, unless one was given."""
        checkpoint = read_checkpoint(find_file(self.checkpoint, FILES))
        self.reads_tap = self.context.config.get(TAP.name, FINAL) == PRE_MLP
        network = ConfidenceNetwork(checkpoint, reads_tap=self.reads_tap)
        self.check_hidden_size(network.hidden_size)
        self.take_threshold(checkpoint, as_threshold(checkpoint, checkpoint.facts.get("threshold")))
        self._mlp = network
        return network

    def to(self, device: torch.device) -> None:
        """The network."""
        if self.model == 0:
            self._mlp.to(device)


class Confidence(Citer):
    """To the other model where the confidence is below ``threshold``."""

    parameters = CONFIDENCE_PARAMETERS
    usual = 0.7
