"""The ``extras`` bank of a slot: what travels with a request besides its tokens.

Two banks a slot; a writer fills the one that the baton word does not name and flips the bit in
the same store that hands the request over, so that a reader never sees half of it. The first 16
bytes belong to the runtime, the other 64 to the algorithm.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from trserve.ipc.baton import MAX_LENGTH
from trserve.ipc.layout import ROUTER_EXTRAS_BYTES, RUNTIME_EXTRAS_BYTES

# The second word: pending microseconds (9 hours at most), length:28, empty:1.
_WORDS: Final = struct.Struct("=qQ")
_PENDING_SHIFT: Final = 29
_MAX_PENDING_US: Final = (1 << 64 - _PENDING_SHIFT) - 1


class Extras(NamedTuple):
    """What one hop says about itself.

    ``stored_ns``: when the baton was stored (``time.monotonic_ns``, the same clock in all
    processes); ``pending_ns``: how long the request has been away from its entry model so far, to
    the microsecond; ``empty``: whether the hop committed nothing; ``length``: the row's at that
    store, from which a restarted owner knows what its predecessor committed since; ``router``: the
    algorithm's bytes.
    """

    stored_ns: int
    pending_ns: int
    empty: bool
    length: int
    router: bytes = b""


def write_extras(bank: memoryview, extras: Extras) -> None:
    """Fill an inactive bank; ``extras.router`` fits its 64 bytes, zero-padded."""
    if len(extras.router) > ROUTER_EXTRAS_BYTES:
        raise ValueError(f"extras of {len(extras.router)} bytes; {ROUTER_EXTRAS_BYTES} at most")
    pending_us = min(extras.pending_ns // 1000, _MAX_PENDING_US)
    packed = pending_us << _PENDING_SHIFT | extras.length << 1 | extras.empty
    words = _WORDS.pack(extras.stored_ns, packed)
    bank[:] = words + extras.router.ljust(ROUTER_EXTRAS_BYTES, b"\0")


def read_extras(bank: memoryview) -> Extras:
    """What an active bank says; ``router`` is 64 bytes, zero-padded."""
    stored_ns, packed = _WORDS.unpack(bank[:RUNTIME_EXTRAS_BYTES])
    return Extras(
        stored_ns,
        (packed >> _PENDING_SHIFT) * 1000,
        bool(packed & 1),
        packed >> 1 & MAX_LENGTH,
        bytes(bank[RUNTIME_EXTRAS_BYTES:]),
    )
