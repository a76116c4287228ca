"""Writing ONNX graphs node by node, with large tensors in a file beside them.

The file of tensors is written as they come, so that no more than one of them is in memory, and no
graph reaches the 2 GiB that a protobuf message may have. Knows ONNX; nothing of decoders.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper

OPSET: Final = 21
IR_VERSION: Final = 10
MICROSOFT: Final = "com.microsoft"
_INLINE_BELOW: Final = 1024
_ALIGNMENT: Final = 4096
"""Of each tensor in the file: a page, so that mapping one maps no other."""

Array = npt.NDArray[Any]
Shape = Sequence[int | str]


class WeightsFile:
    """The tensors of several graphs, each written once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO = path.open("wb")
        self._written: dict[str, onnx.TensorProto] = {}

    def add(self, name: str, array: Array) -> onnx.TensorProto:
        """The initializer of the tensor ``name``, which is written unless it was before."""
        if name in self._written:
            return self._written[name]
        array = np.ascontiguousarray(array)
        self._file.write(bytes(-self._file.tell() % _ALIGNMENT))
        tensor = onnx.TensorProto(
            name=name,
            dims=array.shape,
            data_type=helper.np_dtype_to_tensor_dtype(array.dtype),
            data_location=onnx.TensorProto.EXTERNAL,
        )
        places = ("location", self._path.name), ("offset", self._file.tell())
        for key, value in (*places, ("length", array.nbytes)):
            tensor.external_data.add(key=key, value=str(value))
        self._file.write(array.data)
        self._written[name] = tensor
        return tensor

    def close(self) -> None:
        """No more tensors."""
        self._file.close()


class GraphWriter:
    """One graph: inputs, nodes in the order in which they run, outputs."""

    def __init__(self, name: str, weights: WeightsFile) -> None:
        self._name = name
        self._weights = weights
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: list[onnx.TensorProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._used: set[str] = set()

    def input(self, name: str, dtype: npt.DTypeLike, shape: Shape) -> str:
        """Declare an input; texts in ``shape`` name sizes that vary."""
        self._inputs.append(_value(name, dtype, shape))
        return name

    def output(self, name: str, dtype: npt.DTypeLike, shape: Shape) -> None:
        """Declare an output: a name that a node has."""
        self._outputs.append(_value(name, dtype, shape))

    def constant(self, name: str, array: Array) -> str:
        """A tensor of the model; in the graph itself if it is small."""
        if name in self._used:
            return name
        self._used.add(name)
        if array.nbytes < _INLINE_BELOW:
            self._initializers.append(onnx.numpy_helper.from_array(array, name))
        else:
            self._initializers.append(self._weights.add(name, array))
        return name

    def node(
        self,
        kind: str,
        inputs: Sequence[str],
        outputs: str | Sequence[str],
        *,
        domain: str = "",
        **attributes: Any,
    ) -> str:
        """Add a node; returns its first output. Empty names stand for what is left out."""
        names = [outputs] if isinstance(outputs, str) else list(outputs)
        made = helper.make_node(
            kind, list(inputs), names, name=names[0], domain=domain, **attributes
        )
        self._nodes.append(made)
        return names[0]

    def save(self, path: Path) -> None:
        """Write the graph."""
        graph = helper.make_graph(
            self._nodes, self._name, self._inputs, self._outputs, self._initializers
        )
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)
        model.producer_name = "trserve"
        path.write_bytes(model.SerializeToString())


def _value(name: str, dtype: npt.DTypeLike, shape: Shape) -> onnx.ValueInfoProto:
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    return helper.make_tensor_value_info(name, kind, list(shape))
