"""What a link asks of a device, whatever the device is. Knows no slots and no protocol.

Two implement it: ``CudaDevice`` (CuPy's runtime API) and ``CpuDevice``, an emulation that really
uses memory of another process. Pointers are integers. Nothing here waits: ``sync`` below does, and
has a bound.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

from trserve.errors import TrserveError

GRANULE: Final = 2 << 20
"""Inboxes are multiples of it: smaller blocks of CUDA's allocator share one allocation, and a
handle opens an allocation as a whole."""

HANDLE_BYTES: Final = 64
PAGE_BYTES: Final = 4096
_NAP_S: Final = 20e-6


class DeviceError(TrserveError):
    """A device refused something; what it was to do goes through the row instead."""


class Push(NamedTuple):
    """One record to be written into an entry, and announced to the host that owns the entry.

    Attributes:
        record: the bytes, header first (see inbox.py).
        entry: device pointer of the entry, in the receiver's inbox.
        notice: device pointer of the receiver's host-mapped line for this entry.
    """

    record: bytes
    entry: int
    notice: int


class Forward(NamedTuple):
    """A :class:`Push` whose record lies in this device's memory already, at ``source``."""

    source: int
    entry: int
    notice: int


class Piece(NamedTuple):
    """Ids to copy from ``source`` to ``destination``, both device pointers.

    Attributes:
        num_ids: how many int32; negative: so many, each widened to int64.
    """

    source: int
    destination: int
    num_ids: int


class DeviceApi(Protocol):
    """One device of this process."""

    name: str

    def device_count(self) -> int:
        """Devices that this process sees."""

    def can_access_peer(self, device: int, peer: int) -> bool:
        """Whether kernels of ``device`` may write the memory of ``peer``."""

    def allocate(self, nbytes: int) -> int:
        """Zeroed memory that can be exported; ``nbytes`` is a multiple of :data:`GRANULE`."""

    def free(self, pointer: int) -> None:
        """Give back what :meth:`allocate` gave, once no other process has it open."""

    def export(self, pointer: int) -> bytes:
        """The 64-byte handle of an allocation, which another process may open."""

    def open(self, handle: bytes) -> int:
        """Map another process's allocation. Opening it again counts, and gives the same pointer."""

    def close(self, pointer: int) -> None:
        """Take back one :meth:`open`."""

    def register(self, address: int, nbytes: int) -> int:
        """Make mapped host memory (whole pages) visible to the device; its device pointer."""

    def unregister(self, address: int) -> None:
        """Take back :meth:`register`; before the memory is unmapped."""

    def push(self, pushes: Sequence[Push]) -> bool:
        """Write records into entries, in stream order and in that of ``inbox.stores``.

        False, and nothing is written, if too many are under way.
        """

    def forward(self, forwards: Sequence[Forward]) -> bool:
        """:meth:`push` of records that lie on the device."""

    def collect(self, pieces: Sequence[Piece]) -> bool:
        """Copy ids to where a step reads them, in order with this device's own copies."""

    def record(self) -> int:
        """A mark behind everything that was asked for so far."""

    def done(self, mark: int) -> bool:
        """Whether everything before ``mark`` has been done."""

    def read(self, pointer: int, nbytes: int) -> bytes:
        """Device memory as the host finds it, after everything asked for; for checks only."""


def sync(api: DeviceApi, timeout_s: float) -> None:
    """Wait until the device has done what was asked for. DeviceError after ``timeout_s``."""
    mark, deadline = api.record(), time.monotonic() + timeout_s
    while not api.done(mark):
        if time.monotonic() > deadline:
            raise DeviceError(f"{api.name} did not finish its copies within {timeout_s:g} s")
        time.sleep(_NAP_S)
