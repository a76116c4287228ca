"""8-bit weights: symmetric, one scale for each output, rounded to nearest when they are loaded.

Only weights are quantized; activations, norms, the embedding and the KV cache keep their type. A
product of an activation and an 8-bit weight is exact before it is added up: the weight, -127 to
127, is exact in bfloat16, and its scale multiplies the finished sum.

Knows nothing of layers or files.
"""

from __future__ import annotations

import copy

import torch

from trserve.models.layers import Linear

_LARGEST = 127.0
_ROWS = 4096


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``weight`` [out, in] as int8 of that shape and float32 scales [out]; their product is near.

    No weight moves by more than half a scale, which is its row's largest magnitude over 127.
    """
    stored, scales = torch.empty(weight.shape, dtype=torch.int8), torch.empty(len(weight))
    for start in range(0, len(weight), _ROWS):  # beside a large head there is little room
        rows = slice(start, start + _ROWS)
        exact = weight[rows].float()
        largest = exact.abs().amax(dim=1)
        scales[rows] = torch.where(largest > 0, largest / _LARGEST, 1.0)
        stored[rows] = (exact / scales[rows, None]).round_()
    return stored, scales


class Int8Linear(Linear):
    """A projection with 8-bit weights, half or a quarter of the bytes that a step must read.

    The compiled kernels read :attr:`rows` and :attr:`scales`. Torch, which takes the large steps,
    gets the weight back in the activations' type for each of its products.
    """

    __slots__ = ("_dtype",)

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._dtype = weight.dtype
        self._bias = bias
        self._packed = False
        self.bias = None if bias is None else bias.float()
        self.rows, self.scales = quantize(weight)

    def with_bias(self, bias: torch.Tensor | None) -> Int8Linear:
        """The same weights, not copied, and another bias."""
        other = copy.copy(self)
        other._bias = bias
        other.bias = None if bias is None else bias.float()
        return other

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        assert self.rows is not None and self.scales is not None
        weight = self.rows.to(self._dtype)
        product = (torch.mm(x, weight.t()).float() * self.scales).to(self._dtype)
        return product if self._bias is None else product.add_(self._bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] to a new [T, out]."""
        return self._product(x)

    def into(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Write ``self(x)`` to ``out``."""
        out.copy_(self._product(x))

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        """Add ``self(x)`` to ``residual``, in place."""
        residual.add_(self._product(x))
