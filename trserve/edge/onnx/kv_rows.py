"""Keys and values of the rows that an ONNX model holds, and what binds a row's memory to a run.

A row is one KV block: its keys in a layer are one contiguous [kv_heads, capacity, head_dim], bound
as past and as present at once, so that a run appends in place. Knows memory and names of inputs;
nothing of who owns a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from trserve.models.spec import ModelSpec

if TYPE_CHECKING:
    import onnxruntime

CPU: Final = "cpu"
_KINDS: Final = ("key", "value")


class KVRows:
    """The memory of ``rows`` rows of up to ``capacity`` tokens, float32.

    Nothing of it is taken before a token is written: the pages are the kernel's zero page until
    then.
    """

    def __init__(self, spec: ModelSpec, *, rows: int, capacity: int) -> None:
        self.rows = rows
        self.capacity = capacity
        shape = (rows, spec.num_layers, len(_KINDS), spec.num_kv_heads, capacity, spec.head_dim)
        self.memory: npt.NDArray[np.float32] = np.zeros(shape, np.float32)

    def bind(self, row: int, binding: onnxruntime.IOBinding) -> None:
        """Make ``binding`` read and write the caches of ``row``."""
        own = self.memory[row]
        shape = [1, *own.shape[2:]]
        for layer, kind in np.ndindex(own.shape[:2]):
            address = own[layer, kind].ctypes.data
            name = _KINDS[kind]
            binding.bind_input(f"past_{name}.{layer}", CPU, 0, np.float32, shape, address)
            binding.bind_output(f"{name}.{layer}", CPU, 0, np.float32, shape, address)
