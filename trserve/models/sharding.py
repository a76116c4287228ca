"""One rank's share of a decoder: which slice of each tensor is its own, and the sums of the ranks.

The division of Megatron-LM (Shoeybi et al., 2019): query, key and value projections by KV head,
gate and up by rows, output and down projections by columns, so that a layer needs two sums over
the ranks and nothing else. Norms and the embedding are whole everywhere. The head is whole on rank
0, which samples, and absent elsewhere: logits need no collective and are those of one process.

A slice is taken from the very tensor that one process would load, so ranks together hold the same
weights, dummy ones too. Knows names and shapes; nothing of files, processes or how sums are made.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Final, Protocol

import torch

from trserve.models.decoder import Decoder
from trserve.models.division import check_divisible
from trserve.models.layers import Linear
from trserve.models.mlp import DenseMlp
from trserve.models.quantized import Int8Linear
from trserve.models.spec import ModelSpec

_BY_ROWS: Final = frozenset({"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"})
_BY_COLUMNS: Final = frozenset({"o_proj", "down_proj"})


class Collective(Protocol):
    """The ranks of one model, as their decoders see them.

    Attributes:
        rank: this process, 0 being the worker.
        size: how many there are.
    """

    rank: int
    size: int

    def all_reduce(self, x: torch.Tensor) -> None:
        """Replace contiguous ``x`` by the sum over all ranks, the same bits on each of them."""

    def close(self) -> None:
        """Leave; no call follows."""


@dataclass(frozen=True)
class Shard:
    """The share of rank ``rank`` of ``size``.

    With ``int8`` a row has the scale that it has in one process: so projections that are divided
    by columns are quantized whole (:meth:`narrow`).
    """

    rank: int = 0
    size: int = 1
    int8: bool = False

    def spec(self, whole: ModelSpec) -> ModelSpec:
        """The shape of this share of ``whole``.

        Raises:
            ModelUnavailableError: ``whole`` cannot be divided by ``size``.
        """
        if self.size == 1:
            return whole
        check_divisible(whole, self.size, whole.architecture)
        experts = whole.experts
        if experts is not None:
            experts = replace(experts, intermediate_size=experts.intermediate_size // self.size)
        return replace(
            whole,
            num_heads=whole.num_heads // self.size,
            num_kv_heads=whole.num_kv_heads // self.size,
            intermediate_size=whole.intermediate_size // self.size,
            experts=experts,
            # Without a head of its own: it takes the embedding for one, and never uses it.
            tie_word_embeddings=whole.tie_word_embeddings or self.rank > 0,
        )

    def part(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """This share of the whole ``tensor`` called ``name``: a view of it where that will do."""
        if self.size == 1:
            return tensor
        *_, module, kind = name.split(".")
        if module in _BY_ROWS:
            return self._slice(tensor, 0)
        if module not in _BY_COLUMNS:
            return tensor
        if kind == "weight":
            return tensor if self.int8 else self._slice(tensor, 1)
        # Added once, with rank 0's part of the sum.
        return tensor if self.rank == 0 else torch.zeros_like(tensor)

    def narrow(self, name: str, linear: Int8Linear) -> Int8Linear:
        """This share of the whole projection called ``name``, if it is divided by columns."""
        if self.size == 1 or name.rpartition(".")[2] not in _BY_COLUMNS:
            return linear
        assert self.int8 and linear.rows is not None
        share = copy.copy(linear)
        share.rows = self._slice(linear.rows, 1).contiguous()
        return share

    def _slice(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        length = tensor.shape[dim] // self.size
        return tensor.narrow(dim, self.rank * length, length)


WHOLE: Final = Shard()


class RowParallel(Linear):
    """A projection of which each rank holds some columns: what they make is added up.

    A bias comes with rank 0's part. Used where a decoder adds to its residual, and only there.
    """

    __slots__ = ("_group", "_inner")

    def __init__(self, inner: Linear, group: Collective) -> None:
        # What the compiled kernels would read is left out: they cannot wait for another rank.
        self._bias, self._packed = None, False
        self.rows = self.scales = self.bias = None
        self._inner = inner
        self._group = group

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] to a new [T, out], the same on all ranks."""
        total = self._inner(x)
        self._group.all_reduce(total)
        return total

    def into(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Write ``self(x)`` to ``out``."""
        out.copy_(self(x))

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        """Add ``self(x)`` to ``residual``, in place."""
        residual.add_(self(x))


def connect(decoder: Decoder, group: Collective) -> None:
    """Make the layers of ``decoder``, which is one share, add up what the ranks of ``group`` have.

    Every rank must then run the same steps.
    """
    for layer in decoder.layers:
        layer.output = RowParallel(layer.output, group)
        if isinstance(layer.mlp, DenseMlp):
            layer.mlp.down = RowParallel(layer.mlp.down, group)
        else:
            layer.mlp.reduce = group.all_reduce
