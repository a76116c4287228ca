"""A projection in a graph: float32 as it is, or 8-bit weights in blocks.

Knows layouts of weights; nothing of which projection it is.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from trserve.edge.onnx.graph import MICROSOFT, GraphWriter

BLOCK: Final = 32
"""Inputs that share a scale: a block of 32 costs 1/8 more than its bytes, and errs by half of what
one scale for each output does."""
_LARGEST: Final = 127.0
_ZERO: Final = 128
"""What stands for 0 in a byte of ``MatMulNBits`` where nothing else is said."""
_ACCURACY_INT8: Final = 4
"""Activations are rounded to 8 bits a block as well: the runtime multiplies bytes then. In float32
(level 1) it has no kernel for 8-bit weights, and takes 20 times as long."""

Weights = npt.NDArray[np.float32]


class Projector:
    """Adds ``x @ weight.T + bias`` to a graph.

    Args:
        int8: whether the weights have 8 bits, with a float32 scale for each :data:`BLOCK` inputs of
            an output, and activations are rounded alike.
    """

    def __init__(self, graph: GraphWriter, *, int8: bool) -> None:
        self._graph = graph
        self._int8 = int8

    def add(self, name: str, x: str, weight: Weights, bias: Weights | None = None) -> str:
        """The product with ``weight`` [out, in], plus ``bias`` [out]; returns its name."""
        graph, out = self._graph, f"{name}.out"
        if self._int8:
            self._add_8_bits(name, x, weight, out)
        else:
            # A constant right factor is packed once, when the graph is loaded, if it is [in, out].
            graph.node("MatMul", [x, graph.constant(f"{name}.weight", weight.T)], out)
        if bias is None:
            return out
        return graph.node("Add", [out, graph.constant(f"{name}.bias", bias)], f"{name}.biased")

    def add_tied(self, name: str, x: str, rows: str, weight: Weights) -> str:
        """The product of ``x`` [n, in] with ``weight`` [out, in], which the graph has as ``rows``.

        8-bit weights are a tensor of their own: what ids are looked up in keeps its precision.
        """
        if self._int8:
            return self.add(name, x, weight)
        return self._graph.node("Gemm", [x, rows], f"{name}.out", transB=1)

    def _add_8_bits(self, name: str, x: str, weight: Weights, out: str) -> None:
        graph, (stored, scales) = self._graph, quantize_blocks(weight)
        factors = [
            graph.constant(f"{name}.stored", stored),
            graph.constant(f"{name}.scales", scales),
        ]
        graph.node(
            "MatMulNBits",
            [x, *factors],
            out,
            domain=MICROSOFT,
            N=weight.shape[0],
            K=weight.shape[1],
            bits=8,
            block_size=BLOCK,
            accuracy_level=_ACCURACY_INT8,
        )


def quantize_blocks(weight: Weights) -> tuple[npt.NDArray[np.uint8], Weights]:
    """``weight`` [out, in] as bytes [out, blocks, BLOCK] and float32 scales [out * blocks].

    Symmetric, rounded to nearest; the last block is padded with zeros.
    """
    outputs, inputs = weight.shape
    blocks = -(-inputs // BLOCK)
    padded = np.zeros((outputs, blocks * BLOCK), np.float32)
    padded[:, :inputs] = weight
    split = padded.reshape(outputs, blocks, BLOCK)
    largest = np.abs(split).max(-1)
    scales = np.where(largest > 0, largest / _LARGEST, 1.0).astype(np.float32)
    stored = np.rint(split / scales[..., None]) + _ZERO
    return stored.astype(np.uint8), scales.reshape(-1)
