"""The ``extras`` bank of a slot: what travels with a request besides its tokens.

Two banks a slot; a writer fills the one that the baton word does not name and flips the bit in
the same store that hands the request over, so that a reader never sees half of it. The first 16
bytes belong to the runtime, the other 64 to the algorithm.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from trserve.ipc.layout import ROUTER_EXTRAS_BYTES, RUNTIME_EXTRAS_BYTES

_EMPTY_BIT: Final = 1
_WORDS: Final = struct.Struct("=qq")


class Extras(NamedTuple):
    """What one hop says about itself.

    ``stored_ns``: when the baton was stored (``time.monotonic_ns``, the same clock in all
    processes); ``pending_ns``: how long the request has been away from its entry model so far;
    ``empty``: whether the hop committed nothing; ``router``: the algorithm's bytes.
    """

    stored_ns: int
    pending_ns: int
    empty: bool
    router: bytes = b""


def write_extras(bank: memoryview, extras: Extras) -> None:
    """Fill an inactive bank; ``extras.router`` fits its 64 bytes, zero-padded."""
    if len(extras.router) > ROUTER_EXTRAS_BYTES:
        raise ValueError(f"extras of {len(extras.router)} bytes; {ROUTER_EXTRAS_BYTES} at most")
    words = _WORDS.pack(extras.stored_ns, extras.pending_ns << _EMPTY_BIT | extras.empty)
    bank[:] = words + extras.router.ljust(ROUTER_EXTRAS_BYTES, b"\0")


def read_extras(bank: memoryview) -> Extras:
    """What an active bank says; ``router`` is 64 bytes, zero-padded."""
    stored_ns, packed = _WORDS.unpack(bank[:RUNTIME_EXTRAS_BYTES])
    return Extras(
        stored_ns,
        packed >> _EMPTY_BIT,
        bool(packed & _EMPTY_BIT),
        bytes(bank[RUNTIME_EXTRAS_BYTES:]),
    )
