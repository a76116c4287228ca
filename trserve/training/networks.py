"""The networks of R2R, CITER and Co-LLM with parameters by their official names.

``state_dict`` is what the server's loaders read. Knows no data and no files.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final

import torch
from torch import nn

R2R_CLASS: Final = "HiddenStatesTokenLMHeadLogitsClassifier"
_SMALLEST_DEVIATION: Final = 1e-4


class R2RBlock(nn.Module):
    """``x + W2 gelu(W1 norm(x))``; x is projected where the widths differ."""

    def __init__(self, inputs: int, outputs: int, expansion: int, dropout: float) -> None:
        super().__init__()
        wide = expansion * inputs
        self.layer_norm = nn.LayerNorm(inputs)
        layers = [nn.Linear(inputs, wide), nn.GELU(), nn.Dropout(dropout)]
        self.mlp = nn.Sequential(*layers, nn.Linear(wide, outputs), nn.Dropout(dropout))
        self.dim_change = nn.Linear(inputs, outputs) if inputs != outputs else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From [B, inputs] to [B, outputs]."""
        skipped = x if self.dim_change is None else self.dim_change(x)
        inner: torch.Tensor = self.mlp(self.layer_norm(x))
        return skipped + inner


class R2RBackbone(nn.Module):
    """From [B, dims[0]] to one logit a row."""

    def __init__(self, dims: Sequence[int], expansion: int, dropout: float) -> None:
        super().__init__()
        self.input_projection = nn.Linear(dims[0], dims[0])
        widths = zip(dims, [*dims[1:], dims[-1]], strict=True)
        self.blocks = nn.ModuleList(R2RBlock(i, o, expansion, dropout) for i, o in widths)
        self.output_layer = nn.Sequential(nn.LayerNorm(dims[-1]), nn.Linear(dims[-1], 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The logits [B]."""
        x = self.input_projection(x)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.output_layer(x)
        return logits.squeeze(-1)


class Scaled(nn.Module, ABC):
    """A network that training shows standardized inputs.

    :meth:`fold` moves that into the weights, which then read what the server gives them.
    """

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self._mean, self._deviation = torch.zeros(inputs), torch.ones(inputs)

    def standardize(self, inputs: torch.Tensor) -> None:
        """Take mean and deviation of every column of ``inputs`` [N, inputs]."""
        self._mean = inputs.float().mean(0)
        self._deviation = inputs.float().std(0).clamp_min(_SMALLEST_DEVIATION)

    def scaled(self, inputs: torch.Tensor) -> torch.Tensor:
        """``inputs`` with mean 0 and deviation 1."""
        return (inputs - self._mean) / self._deviation

    @torch.no_grad()
    def fold(self) -> None:
        """Put the standardization into the weights of the first layers."""
        first = 0
        for layer, columns in self.first_layers():
            part = slice(first, first + columns)
            _fold(layer, self._mean[part].double(), self._deviation[part].double())
            first += columns
        self._mean.zero_()
        self._deviation.fill_(1.0)

    @abstractmethod
    def first_layers(self) -> list[tuple[nn.Linear, int]]:
        """The layers that read the inputs, in order; how many of them, in their first columns."""


def _fold(layer: nn.Linear, mean: torch.Tensor, deviation: torch.Tensor) -> None:
    columns = slice(0, len(mean))
    weight = layer.weight[:, columns].double() / deviation
    layer.bias.copy_((layer.bias.double() - weight @ mean).float())
    layer.weight[:, columns] = weight.float()


class R2RClassifier(Scaled):
    """R2R's published class: from hidden state, token embedding and top logits to a logit."""

    def __init__(
        self, hidden: int, num_logits: int, dims: Sequence[int], expansion: int, dropout: float
    ) -> None:
        super().__init__(2 * hidden + num_logits)
        self._sizes = [2 * hidden, num_logits]
        self.logits_projection = nn.Linear(num_logits, hidden)
        self.combined_projection = nn.Linear(3 * hidden, dims[0])
        self.backbone = R2RBackbone(dims, expansion, dropout)

    def first_layers(self) -> list[tuple[nn.Linear, int]]:
        """Hidden state and embedding go through one layer, the logits through another."""
        layers = [self.combined_projection, self.logits_projection]
        return list(zip(layers, self._sizes, strict=True))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The logits [B] of ``inputs`` [B, hidden + hidden + logits]."""
        states, logits = torch.split(self.scaled(inputs), self._sizes, dim=-1)
        both = torch.cat([states, self.logits_projection(logits)], -1)
        found: torch.Tensor = self.backbone(self.combined_projection(both))
        return found


class ConfidenceMLP(Scaled):
    """CITER's network, and the edge system's: from the hidden state to a logit of confidence."""

    def __init__(self, hidden: int, dropout: float = 0.1) -> None:
        super().__init__(hidden)
        wide = 2 * hidden
        layers = [nn.Linear(hidden, wide), nn.BatchNorm1d(wide), nn.ReLU(), nn.Dropout(dropout)]
        self.mlp = nn.Sequential(*layers, nn.Linear(wide, hidden), nn.Dropout(dropout))
        self.linear = nn.Linear(hidden, 1)
        self._hidden = hidden

    def first_layers(self) -> list[tuple[nn.Linear, int]]:
        """One."""
        first = self.mlp[0]
        assert isinstance(first, nn.Linear)
        return [(first, self._hidden)]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits [B] of ``hidden`` [B, H]."""
        logits: torch.Tensor = self.linear(self.mlp(self.scaled(hidden)))
        return logits.squeeze(-1)


class DeferVector(nn.Module):
    """Co-LLM's row of the head beside a base model that stays as it is."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.zeros(1, hidden))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits [B] of deferring for ``hidden`` [B, H]."""
        return (hidden @ self.vector.T).squeeze(-1)
