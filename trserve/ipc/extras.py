"""The ``extras`` bank of a slot: what travels with a request besides its tokens.

Two banks a slot; a writer fills the one that the baton word does not name and flips the bit in
the same store that hands the request over, so that a reader never sees half of it. The first 16
bytes belong to the runtime, the other 64 to the algorithm.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from trserve.ipc.baton import MAX_LENGTH
from trserve.ipc.layout import EXTRAS_BYTES, ROUTER_EXTRAS_BYTES

# The second word: alone:1, pending microseconds (4 hours at most), length:28, empty:1. Then the
# router's bytes, which packing pads with zeros.
_BANK: Final = struct.Struct(f"=qQ{ROUTER_EXTRAS_BYTES}s")
assert _BANK.size == EXTRAS_BYTES
_PENDING_SHIFT: Final = 29
_ALONE_SHIFT: Final = 63
_MAX_PENDING_US: Final = (1 << _ALONE_SHIFT - _PENDING_SHIFT) - 1
_new: Final = tuple.__new__


class Extras(NamedTuple):
    """What one hop says about itself.

    ``stored_ns``: when the baton was stored (``time.monotonic_ns``, the same clock in all
    processes); ``pending_ns``: how long the request has been away from its entry model so far, to
    the microsecond; ``empty``: whether the hop committed nothing or, of a request that is over with
    a numeric error, whether that is its own grammar's doing; ``length``: the row's at that store,
    from which a restarted owner knows what its predecessor committed since; ``router``: the
    algorithm's bytes; ``alone``: whether the request was taken back from a model that cannot be
    reached, which was to write the next token.
    """

    stored_ns: int
    pending_ns: int
    empty: bool
    length: int
    router: bytes = b""
    alone: bool = False


def write_extras(
    bank: memoryview,
    stored_ns: int,
    pending_ns: int,
    empty: bool,
    length: int,
    router: bytes = b"",
    alone: bool = False,
) -> None:
    """Fill an inactive bank with what :class:`Extras` names; ``router`` is zero-padded."""
    if len(router) > ROUTER_EXTRAS_BYTES:
        raise ValueError(f"extras of {len(router)} bytes; {ROUTER_EXTRAS_BYTES} at most")
    pending_us = pending_ns // 1000
    if pending_us > _MAX_PENDING_US:
        pending_us = _MAX_PENDING_US
    packed = alone << _ALONE_SHIFT | pending_us << _PENDING_SHIFT | length << 1 | empty
    bank[:] = _BANK.pack(stored_ns, packed, router)


def read_extras(bank: memoryview) -> Extras:
    """What an active bank says; ``router`` is 64 bytes, zero-padded."""
    stored_ns, packed, router = _BANK.unpack(bank[:])
    pending_ns = (packed >> _PENDING_SHIFT & _MAX_PENDING_US) * 1000
    alone, empty = packed >> _ALONE_SHIFT == 1, packed & 1 == 1
    return _new(Extras, (stored_ns, pending_ns, empty, packed >> 1 & MAX_LENGTH, router, alone))
