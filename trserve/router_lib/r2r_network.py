"""The networks of R2R (arXiv 2505.21600): from hidden state, token and logits to one logit.

Four of the official classes, by the tensors that their files hold; sizes are read off the tensors,
never off the arguments that stand beside them. ``x = P [h ; e(y) ; L z]``, a linear layer, blocks
``x + W2 gelu(W1 norm(x))``, ``w . norm(x) + b``. h is the hidden state after the final norm, e(y)
the input embedding of the sampled token, z the largest raw logits in falling order. Knows no
files, no thresholds and no requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch.nn.functional import gelu, layer_norm, linear

from trserve.router_lib.base import StepResult
from trserve.router_lib.checkpoints import Checkpoint
from trserve.router_lib.signals import largest_logits

EMBEDDING: Final = "token_embeddings.weight"
_BLOCKS: Final = "backbone.blocks"
_EPS: Final = 1e-5
"""LayerNorm's, which the files do not state."""

Layer = tuple[torch.Tensor, torch.Tensor]
Embedding = Callable[[int], torch.Tensor]
"""From a hidden size to the token embedding [V, hidden size]."""


@dataclass(frozen=True)
class Inputs:
    """What a class reads, and the name of the projection that all of it goes through."""

    hidden: bool
    token: bool
    logits: bool
    projection: str
    norm: str = "layer_norm_hidden_states"


CLASSES: Final = {
    "HiddenStatesTokenLMHeadLogitsClassifier": Inputs(True, True, True, "combined_projection"),
    "HiddenStatesLogitsClassifier": Inputs(True, False, True, "combined_projection"),
    "HiddenStatesClassifier": Inputs(
        True, False, False, "hidden_states_projection", norm="layer_norm"
    ),
    "LogitsClassifier": Inputs(False, False, True, "logits_projection"),
}


class R2RNetwork:
    """A network of ``checkpoint``, whose class is ``name``.

    All that is linear before the first block is folded into one layer over [h ; e(y) ; z].

    Attributes:
        hidden_size: of the states that it reads; None where it reads none.
        num_logits: how many of the largest logits it reads; 0 for none.

    Raises:
        ConfigError: a tensor is missing, too many, or of another shape.
    """

    def __init__(
        self, checkpoint: Checkpoint, name: str, *, normalize: bool, embedding: Embedding
    ) -> None:
        file = _File(checkpoint)
        self._inputs = inputs = CLASSES[name]
        self._normalize = normalize
        self.hidden_size = file.hidden_size(inputs)
        hidden = self.hidden_size or 0
        self.num_logits = file.num_logits() if inputs.logits else 0
        norms = normalize and inputs.hidden
        self._norm = file.norm(inputs.norm, hidden) if norms else None
        self._token_norm = file.norm("layer_norm_token", hidden) if norms and inputs.token else None
        self._embedding = embedding(hidden) if inputs.token else None
        self._input, width = file.input_layer(inputs, hidden, self.num_logits)
        self._blocks, width = file.blocks(width)
        self._output_norm = file.norm("backbone.output_layer.0", width)
        self._output = file.linear("backbone.output_layer.1", 1, width)
        checkpoint.refuse_others(file.used, name)

    def __call__(self, result: StepResult, tokenizer_size: int) -> torch.Tensor:
        """float32 [B]: the probability that the token diverges from the large model's."""
        x = linear(self._features(result, tokenizer_size), *self._input)
        for block in self._blocks:
            x = block(x)
        return linear(_normed(x, self._output_norm), *self._output).squeeze(-1).sigmoid_()

    def to(self, device: torch.device) -> None:
        """Move all tensors."""
        self._norm, self._token_norm = _moved(self._norm, device), _moved(self._token_norm, device)
        if self._embedding is not None:
            self._embedding = self._embedding.to(device)
        self._input = _on(self._input, device)
        self._blocks = [block.to(device) for block in self._blocks]
        self._output_norm = _on(self._output_norm, device)
        self._output = _on(self._output, device)

    def _features(self, result: StepResult, tokenizer_size: int) -> torch.Tensor:
        parts = []
        if self._inputs.hidden:
            parts.append(_normed(result.hidden.float(), self._norm))
        if self._embedding is not None:
            # A row whose logits were not finite has no token; what it gets is not looked at.
            embedded = self._embedding[result.token_ids.clamp(min=0)].float()
            parts.append(_normed(embedded, self._token_norm))
        if self.num_logits:
            largest = largest_logits(result.logits, tokenizer_size, self.num_logits)
            parts.append(largest.softmax(dim=-1) if self._normalize else largest)
        return torch.cat(parts, dim=-1)


class _File:
    """Takes the parts of a network out of a checkpoint; ``used`` are the tensors it knows."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.used = [EMBEDDING]

    def num_logits(self) -> int:
        return self._checkpoint.shape("logits_projection.weight", 2)[1]

    def hidden_size(self, inputs: Inputs) -> int | None:
        if not inputs.hidden:
            return None
        if inputs.logits:
            return self._checkpoint.shape("logits_projection.weight", 2)[0]
        return self._checkpoint.shape(f"{inputs.projection}.weight", 2)[1]

    def input_layer(self, inputs: Inputs, hidden: int, num_logits: int) -> tuple[Layer, int]:
        """All that comes before the blocks, as one layer, and its width."""
        width, _ = self._checkpoint.shape(f"{inputs.projection}.weight", 2)
        if inputs.hidden and inputs.logits:
            of_logits = self.linear("logits_projection", hidden, num_logits)
            states = hidden * (1 + inputs.token)
            weight, bias = self.linear(inputs.projection, width, states + hidden)
            folded, bias = _composed((weight[:, states:], bias), of_logits)
            layer = torch.cat((weight[:, :states], folded), dim=1), bias
        else:
            layer = self.linear(inputs.projection, width, hidden or num_logits)
        outputs, _ = self._checkpoint.shape("backbone.input_projection.weight", 2)
        second = self.linear("backbone.input_projection", outputs, width)
        return _composed(second, layer), outputs

    def blocks(self, width: int) -> tuple[list[_Block], int]:
        """The blocks, of which the first reads ``width`` numbers, and what the last one writes."""
        found: list[_Block] = []
        while f"{_BLOCKS}.{len(found)}.mlp.0.weight" in self._checkpoint:
            block = self._block(f"{_BLOCKS}.{len(found)}", width)
            found.append(block)
            width = block.width
        return found, width

    def _block(self, prefix: str, width: int) -> _Block:
        expanded, _ = self._checkpoint.shape(f"{prefix}.mlp.0.weight", 2)
        outputs, _ = self._checkpoint.shape(f"{prefix}.mlp.3.weight", 2)
        change = self.linear(f"{prefix}.dim_change", outputs, width) if outputs != width else None
        return _Block(
            norm=self.norm(f"{prefix}.layer_norm", width),
            first=self.linear(f"{prefix}.mlp.0", expanded, width),
            second=self.linear(f"{prefix}.mlp.3", outputs, expanded),
            change=change,
        )

    def linear(self, name: str, outputs: int, inputs: int) -> Layer:
        self.used += [f"{name}.weight", f"{name}.bias"]
        return self._checkpoint.linear(name, outputs, inputs)

    def norm(self, name: str, size: int) -> Layer:
        self.used += [f"{name}.weight", f"{name}.bias"]
        weight = self._checkpoint.take(f"{name}.weight", size)
        return weight, self._checkpoint.take(f"{name}.bias", size)


@dataclass(frozen=True)
class _Block:
    """``x + W2 gelu(W1 norm(x))``, with x projected where the widths differ."""

    norm: Layer
    first: Layer
    second: Layer
    change: Layer | None

    @property
    def width(self) -> int:
        """Of its output."""
        return len(self.second[1])

    def to(self, device: torch.device) -> _Block:
        """The same weights there."""
        return _Block(
            norm=_on(self.norm, device),
            first=_on(self.first, device),
            second=_on(self.second, device),
            change=_moved(self.change, device),
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        inner = linear(gelu(linear(_normed(x, self.norm), *self.first)), *self.second)
        return inner + (x if self.change is None else linear(x, *self.change))


def _on(layer: Layer, device: torch.device) -> Layer:
    return layer[0].to(device), layer[1].to(device)


def _moved(layer: Layer | None, device: torch.device) -> Layer | None:
    return None if layer is None else _on(layer, device)


def _composed(outer: Layer, inner: Layer) -> Layer:
    """The layer that applies ``inner``, then ``outer``; products in float64."""
    weight, bias = outer[0].double(), outer[1].double()
    both = weight @ inner[0].double()
    return both.float(), (weight @ inner[1].double() + bias).float()


def _normed(x: torch.Tensor, norm: Layer | None) -> torch.Tensor:
    return x if norm is None else layer_norm(x, (x.shape[-1],), *norm, eps=_EPS)
