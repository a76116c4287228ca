"""Frames whose ids travel by NCCL: what is sent in their place, and how they are whole again.

A frame whose ids are its end is **parted**: all before them goes over the connection, with a
transfer number, a count and a checksum; the ids go in a message of fixed size that names number and
count again. The whole is then read as any other frame. Whatever is none is a FrameError. Knows no
sockets and no communicators.
"""

from __future__ import annotations

import struct
import zlib
from typing import Final, NamedTuple

from trserve.edge import wire
from trserve.edge.wire import FrameError, FrameType
from trserve.ipc.device.communicator import MESSAGE_BYTES, UNIQUE_ID_BYTES

PARTED_HEAD: Final = struct.Struct("<BxHIQ")
"""Type, count of ids, CRC-32 of their bytes, transfer number. Then the frame without its ids."""

_MESSAGE_HEAD: Final = struct.Struct("<QII")
"""Transfer number, count, zero; then the ids, as in frames."""

MAX_IDS: Final = (MESSAGE_BYTES - _MESSAGE_HEAD.size) // 4
_ID_BYTES: Final = 4
_SESSION: Final = struct.Struct("<Q")
_SESSION_AT: Final = {
    FrameType.HANDOFF: 4,
    FrameType.PREFILL: 4,
    FrameType.ANSWER: 4,
    FrameType.NEED: 8,
    FrameType.END: 8,
}


class Parted(NamedTuple):
    """What is announced: ``rest`` is the frame without its ``num_ids`` ids."""

    number: int
    num_ids: int
    checksum: int
    rest: bytes


def ids_behind(frame: bytes) -> int:
    """How many ids ``frame`` ends with, by its head; 0 where it is none that can be parted."""
    kind = frame[0] if frame else 0
    if kind == FrameType.HANDOFF and len(frame) >= wire.HANDOFF_HEAD.size:
        _, flags, *_, count, _ = wire.HANDOFF_HEAD.unpack_from(frame)
        return 0 if flags & wire.WITH_CONTACT else int(count)
    if kind == FrameType.ANSWER and len(frame) >= wire.ANSWER_HEAD.size:
        *_, words = fields = wire.ANSWER_HEAD.unpack_from(frame)
        return 0 if words else int(fields[7])
    return 0


def part(number: int, frame: bytes) -> tuple[bytes, bytes] | None:
    """What goes over the connection, and the message; None for a frame that must go whole."""
    count = ids_behind(frame)
    if not 0 < count <= MAX_IDS:
        return None
    at = len(frame) - _ID_BYTES * count
    ids = frame[at:]
    head = PARTED_HEAD.pack(FrameType.NCCL_PARTED, count, zlib.crc32(ids), number)
    message = (_MESSAGE_HEAD.pack(number, count, 0) + ids).ljust(MESSAGE_BYTES, b"\0")
    return head + frame[:at], message


def decode_parted(frame: bytes) -> Parted:
    """What :func:`part` made for the connection. FrameError for anything else."""
    if len(frame) < PARTED_HEAD.size:
        raise FrameError("the frame is cut short")
    _, count, checksum, number = PARTED_HEAD.unpack_from(frame)
    rest = frame[PARTED_HEAD.size :]
    if not 0 < count <= MAX_IDS or ids_behind(rest) != count:
        raise FrameError("a frame without ids, or with others, is said to be parted from them")
    return Parted(number, count, checksum, rest)


def whole(parted: Parted, message: bytes) -> bytes:
    """The frame as it was. FrameError for a message that is another's, or not whole."""
    number, count, _ = _MESSAGE_HEAD.unpack_from(message)
    if (number, count) != (parted.number, parted.num_ids):
        raise FrameError(
            f"message {number} with {count} ids came in place of {parted.number} with "
            f"{parted.num_ids}"
        )
    end = _MESSAGE_HEAD.size + _ID_BYTES * count
    ids = message[_MESSAGE_HEAD.size : end]
    if zlib.crc32(ids) != parted.checksum:
        raise FrameError(f"the ids of message {number} are not those that were sent")
    return parted.rest + ids


def session_of(frame: bytes) -> int | None:
    """The session that a frame is of; None where it is of none, or none at all."""
    at = _SESSION_AT.get(frame[0]) if frame else None  # type: ignore[call-overload]
    if at is None or len(frame) < at + _SESSION.size:
        return None
    return int(_SESSION.unpack_from(frame, at)[0])


def encode_offer(unique_id: bytes) -> bytes:
    """An NCCL_OFFER: the communicator that its sender will receive by."""
    return bytes((FrameType.NCCL_OFFER,)) + unique_id


def decode_offer(frame: bytes) -> bytes:
    """The inverse. FrameError for anything else."""
    if len(frame) != 1 + UNIQUE_ID_BYTES:
        raise FrameError("no communicator's id")
    return frame[1:]


def encode_fault(text: str) -> bytes:
    """An NCCL_FAULT: why a frame was lost; whoever dialled dials again."""
    return bytes((FrameType.NCCL_FAULT,)) + text.encode()[: wire.STATUS_BYTES]


def decode_fault(frame: bytes) -> str:
    """The inverse. FrameError for anything else."""
    if not 1 <= len(frame) <= 1 + wire.STATUS_BYTES:
        raise FrameError("no fault")
    return frame[1:].decode("utf-8", "replace")
