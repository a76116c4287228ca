"""The bytes of the link between hosts: kinds of frames, their heads, and how long they may be.

One ZeroMQ message a frame, all numbers little-endian, whatever the machine. Frames of the token
path are fixed structs and int32 ids; only the greeting, once a connection, is msgpack. Knows no
sockets and no sessions.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final, NamedTuple

from trserve.ipc.layout import MAX_TOPS, PARAMS_BYTES, ROUTER_EXTRAS_BYTES, record_words

PROTOCOL_VERSION: Final = 1


class FrameType(IntEnum):
    """The first byte of every frame."""

    HELLO = 1
    WELCOME = 2
    REFUSED = 3
    ASK = 4
    FACTS = 5
    PING = 6
    PONG = 7
    HANDOFF = 8
    PREFILL = 9
    END = 10
    ANSWER = 11
    NEED = 12
    STATUS = 13
    NCCL_OFFER = 14
    NCCL_GRANT = 15
    NCCL_PARTED = 16
    NCCL_FAULT = 17


class FrameError(ValueError):
    """A frame that is none; says what is wrong with it."""


class UnfitParamsError(FrameError):
    """A frame with parameters that the model here is not given; says why.

    A client of the host that sent it may have asked for them, so it says nothing of that host.
    """


class Limits(NamedTuple):
    """What a frame may speak of.

    Attributes:
        row_tokens: of the longest row.
        tokenizer_size: ids are below it.
        models: how many there are.
    """

    row_tokens: int
    tokenizer_size: int
    models: int

    @property
    def frame_bytes(self) -> int:
        """The longest frame: all of a row with its annotations, or a greeting."""
        row = self.row_tokens * (4 + 1 + 4 * record_words(MAX_TOPS))
        return max(GREETING_BYTES, row + PARAMS_BYTES + 1024)


GREETING_BYTES: Final = 64 * 1024
STATUS_BYTES: Final = 1024
MAX_SESSION: Final = 2**63 - 1
MAX_MS: Final = 2**32 - 1

HANDOFF_HEAD: Final = struct.Struct("<BBBBQIIII")
"""Type, flags, bytes of extras, models, session, hop, start, count of ids, milliseconds left (0:
for ever). Then an uint32 a model (``left``), the extras, at first contact :data:`CONTACT_HEAD` and
the parameters, and the ids."""

CONTACT_HEAD: Final = struct.Struct("<IIH")
"""Prompt length, limit, bytes of the parameters."""

ANSWER_HEAD: Final = struct.Struct("<BBBBQIIIIiBBH")
"""Type, flags, bytes of extras, models, session, hop, start, count, microseconds there, cached
tokens, destination, finish, words of an annotation. Then ``left`` (if flagged), the sources (one
byte if all are one model's), the extras, the ids, and with annotations :data:`RECORDS_HEAD` and
these."""

RECORDS_HEAD: Final = struct.Struct("<II")
"""Row position of the first, and how many."""

NEED_FRAME: Final = struct.Struct("<BxxxIQI")
"""Type, hop, session, and how many tokens of the row are there."""

SESSION_FRAME: Final = struct.Struct("<BxxxxxxxQ")
"""Type and a session; for pings any number."""

EMPTY: Final = 1
WITH_CONTACT: Final = 2
ONE_SOURCE: Final = 2
WITH_LEFT: Final = 4
MAX_EXTRAS: Final = ROUTER_EXTRAS_BYTES
