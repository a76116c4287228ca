"""The two operations that hold weights: a projection and a norm.

Knows layouts and roundings; nothing of what the weights mean or where they come from. Norms are
computed in float32 whatever the weights are.
"""

from __future__ import annotations

import math

import torch


class Linear:
    """``x @ weight.T + bias`` with the weight laid out for the few rows that a step has.

    For the compiled kernels (``native``) it stays as it is, in :attr:`rows`, which they share with
    torch. Without them a float32 weight is kept transposed ([in, out]), with which torch's product
    takes as little as half the time at 4 to 8 rows; in bfloat16 it is packed once into the blocked
    layout of oneDNN, where torch has that, instead of being reordered in every call.

    Args:
        weight: [out, in].
        bias: [out], or None.
        share: the weight is used as it is and not copied into another layout.
        native: the compiled kernels will use it.

    Attributes:
        rows: the weight [out, in], of a ``native`` one only.
        scales: float32 [out], of 8-bit ``rows``.
        bias: float32 [out] where ``native``; None where there is none.
    """

    __slots__ = ("_bias", "_packed", "_weight", "bias", "rows", "scales")

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        share: bool = False,
        native: bool = False,
    ) -> None:
        self._bias = bias
        self.bias = bias.float() if native and bias is not None else None
        self.scales: torch.Tensor | None = None
        self.rows = weight.contiguous() if native else None
        self._packed = not share and not native and _can_pack(weight)
        if self.rows is not None:
            self._weight = self.rows.t()
        elif self._packed:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        elif weight.dtype == torch.float32 and weight.device.type == "cpu" and not share:
            self._weight = weight.t().contiguous()
        else:
            self._weight = weight.t()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] to a new [T, out]."""
        if self._packed:
            out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self._weight, self._bias, "none", [], ""
            )
            return out
        if self._bias is None:
            return torch.mm(x, self._weight)
        return torch.addmm(self._bias, x, self._weight)

    def into(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Write ``self(x)`` to ``out``."""
        if self._packed:
            out.copy_(self(x))
        elif self._bias is None:
            torch.mm(x, self._weight, out=out)
        else:
            torch.addmm(self._bias, x, self._weight, out=out)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        """Add ``self(x)`` to ``residual``, in place."""
        if self._packed or self._bias is not None:
            residual.add_(self(x))
        else:
            residual.addmm_(x, self._weight)


class RMSNorm:
    """Root mean square norm (Zhang and Sennrich, 2019) over the last dimension, in float32.

    ``x / sqrt(mean(x^2) + eps) * w`` equals ``x / hypot(|x|, sqrt(n * eps)) * (w * sqrt(n))``,
    which is half the operations. With ``scaled`` false the factor ``w * sqrt(n)`` (:attr:`scale`)
    is left to the caller, who has folded it into the projection that follows.
    """

    __slots__ = ("_floor", "scale", "scaled")

    def __init__(self, weight: torch.Tensor, eps: float, *, scaled: bool = True) -> None:
        size = weight.shape[-1]
        self.scale = weight.float() * math.sqrt(size)
        self.scaled = scaled
        self._floor = torch.tensor(math.sqrt(size * eps), device=weight.device)

    def into(self, x: torch.Tensor, length: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Write the norm of ``x`` to ``out``, and return it.

        Args:
            length: float32, as ``x`` but of size 1 in the last dimension; overwritten.
            out: float32, as ``x``.
        """
        torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32, out=length)
        torch.div(x, length.hypot_(self._floor), out=out)
        return out.mul_(self.scale) if self.scaled else out

    def exact(self, x: torch.Tensor) -> torch.Tensor:
        """The whole norm of ``x``, a new float32 tensor, wherever the factor usually goes."""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        normed: torch.Tensor = x / length.hypot_(self._floor)
        return normed.mul_(self.scale)


def _can_pack(weight: torch.Tensor) -> bool:
    return (
        weight.dtype == torch.bfloat16
        and weight.device.type == "cpu"
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
