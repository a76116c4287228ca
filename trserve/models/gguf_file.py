"""The GGUF container: metadata and tensor directory of a memory-mapped file.

Knows the bytes (versions 2 and 3, little endian, as the format's specification has them); nothing
of what a key or a tensor means. Reading the header of a 150,000-token vocabulary takes a tenth of
a second, so the launcher and the gateway can afford it. Imports no torch.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trserve.errors import ModelUnavailableError

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_SCALARS: Final = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING: Final = 8
_ARRAY: Final = 9


@dataclass(frozen=True)
class Quantization:
    """How weights are stored: ``block`` of them in ``nbytes`` bytes."""

    name: str
    block: int
    nbytes: int


PLAIN: Final = {0: Quantization("F32", 1, 4), 1: Quantization("F16", 1, 2)}
PLAIN[30] = Quantization("BF16", 1, 2)

BLOCKED: Final = {
    2: Quantization("Q4_0", 32, 18),
    3: Quantization("Q4_1", 32, 20),
    6: Quantization("Q5_0", 32, 22),
    7: Quantization("Q5_1", 32, 24),
    8: Quantization("Q8_0", 32, 34),
    12: Quantization("Q4_K", 256, 144),
    13: Quantization("Q5_K", 256, 176),
    14: Quantization("Q6_K", 256, 210),
}

QUANTIZATIONS: Final = {**PLAIN, **BLOCKED}
"""What can be read, by the number that files give it."""

_OTHER_NAMES: Final = {
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor: its ``shape`` outermost first, the number of its type, where its bytes begin."""

    shape: tuple[int, ...]
    type: int
    start: int

    @property
    def type_name(self) -> str:
        """Name of the type, or its number where that is unknown."""
        known = QUANTIZATIONS.get(self.type)
        return known.name if known else _OTHER_NAMES.get(self.type, f"type {self.type}")


class GgufFile:
    """A mapped file.

    Attributes:
        metadata: values by key; strings, numbers and lists of them.
        tensors: the directory, by tensor name.

    Raises:
        ModelUnavailableError: it is not a GGUF file of a known version, is cut short, or is one
            of several parts.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                # A private mapping: tensors over it are writable, as torch wants them to be.
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            self.metadata, self.tensors = _read_header(memoryview(self._bytes))
        except (OSError, ValueError, struct.error) as error:
            raise ModelUnavailableError(
                f"{path} is not a readable GGUF file ({error}); copy or download it again"
            ) from None
        if int(self.metadata.get("split.count") or 1) > 1:
            raise ModelUnavailableError(
                f"{path} is one of {self.metadata['split.count']} parts; merge them into one file "
                "first (llama-gguf-split --merge)"
            )

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """The bytes of a tensor whose type is one of :data:`QUANTIZATIONS`; a view of the file.

        Raises:
            ModelUnavailableError: the file ends before the tensor does.
        """
        entry = self.tensors[name]
        kind = QUANTIZATIONS[entry.type]
        size = prod(entry.shape) // kind.block * kind.nbytes
        if entry.start + size > len(self._bytes):
            raise ModelUnavailableError(
                f"{self.path} ends within the tensor {name}; copy or download it again"
            )
        return np.frombuffer(self._bytes, np.uint8, size, entry.start)


def _read_header(data: memoryview) -> tuple[dict[str, Any], dict[str, TensorEntry]]:
    cursor = _Cursor(data)
    if bytes(cursor.take(4)) != _MAGIC:
        raise ValueError("it does not begin with the letters GGUF")
    version = cursor.number("I")
    if version not in _VERSIONS:
        raise ValueError(f"version {version}; readable are 2 and 3, little endian")
    tensor_count, key_count = cursor.number("Q"), cursor.number("Q")
    metadata = {cursor.string(): cursor.value(cursor.number("I")) for _ in range(key_count)}
    entries = [cursor.tensor() for _ in range(tensor_count)]
    alignment = int(metadata.get("general.alignment", 32))
    first = -(-cursor.offset // alignment) * alignment
    return metadata, {
        name: TensorEntry(shape, kind, first + offset) for name, shape, kind, offset in entries
    }


class _Cursor:
    """Reads values one after the other."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.offset = 0

    def take(self, size: int) -> memoryview:
        part = self._data[self.offset : self.offset + size]
        if len(part) < size:
            raise ValueError("it ends within its header")
        self.offset += size
        return part

    def number(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._data, self.offset)
        self.offset += struct.calcsize(f"<{code}")
        return value

    def string(self) -> str:
        # Vocabularies may hold bytes that are no UTF-8; they must survive being written back.
        return str(self.take(self.number("Q")), "utf-8", "surrogateescape")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(self.number("I"), self.number("Q"))
        return self.number(_scalar_code(kind))

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name, dimensions = self.string(), self.number("I")
        shape = tuple(self.number("Q") for _ in range(dimensions))
        return name, shape[::-1], self.number("I"), self.number("Q")

    def _array(self, kind: int, length: int) -> list[Any]:
        if kind == _STRING:
            return self._strings(length)
        if kind == _ARRAY:
            return [self.value(kind) for _ in range(length)]
        dtype = np.dtype(f"<{_scalar_code(kind)}")
        values: list[Any] = np.frombuffer(self.take(length * dtype.itemsize), dtype).tolist()
        return values

    def _strings(self, length: int) -> list[str]:
        """Vocabularies and merges: hundreds of thousands, so without a call for each part."""
        data, offset, read_size = self._data, self.offset, struct.Struct("<Q").unpack_from
        strings = []
        for _ in range(length):
            first = offset + 8
            offset = first + read_size(data, offset)[0]
            strings.append(str(data[first:offset], "utf-8", "surrogateescape"))
        if offset > len(data):
            raise ValueError("it ends within its header")
        self.offset = offset
        return strings


def _scalar_code(kind: int) -> str:
    code = _SCALARS.get(kind)
    if code is None:
        raise ValueError(f"its header has a value of the unknown type {kind}")
    return code
