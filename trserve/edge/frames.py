"""Frames of the token path to bytes and back, everything checked. Knows no sockets, no slab.

Whatever a decoder returns lies within the :class:`~trserve.edge.wire.Limits` that it was given;
whatever does not is a FrameError, and nothing else is raised for any bytes at all.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trserve.edge import wire
from trserve.edge.cloud import STAYS, Answer, Records
from trserve.edge.wire import FrameError, FrameType, Limits
from trserve.ipc.baton import MAX_HOP, Finish
from trserve.ipc.layout import MAX_TOPS, PARAMS_BYTES, record_words

Ids = NDArray[np.int32]
_NO_IDS: Final = np.zeros(0, np.int32)
_FINISHES: Final = frozenset(int(each) for each in Finish)


class Contact(NamedTuple):
    """What is sent of a request once."""

    prompt_len: int
    limit: int
    blob: bytes


class Handoff(NamedTuple):
    """A visit as it travels: ``ids`` are the row's from ``start`` on; see ``cloud.Visit``."""

    session: int
    hop: int
    start: int
    ids: Ids
    left: tuple[int, ...]
    extras: bytes = b""
    empty: bool = False
    left_ms: int = 0
    contact: Contact | None = None


class Need(NamedTuple):
    """The far side has only ``have`` tokens of the row and wants the others."""

    session: int
    hop: int
    have: int


def kind_of(frame: bytes) -> FrameType:
    """What kind of frame it is. FrameError if none."""
    if not frame:
        raise FrameError("an empty frame")
    try:
        return FrameType(frame[0])
    except ValueError:
        raise FrameError(f"frames of type {frame[0]} are unknown") from None


# -- handoffs ------------------------------------------------------------------------------------


def encode_handoff(handoff: Handoff, *, early: bool = False) -> bytes:
    """A HANDOFF, or with ``early`` a PREFILL."""
    contact = handoff.contact
    flags = wire.EMPTY * handoff.empty | wire.WITH_CONTACT * (contact is not None)
    head = wire.HANDOFF_HEAD.pack(
        FrameType.PREFILL if early else FrameType.HANDOFF,
        flags,
        len(handoff.extras),
        len(handoff.left),
        handoff.session,
        handoff.hop,
        handoff.start,
        len(handoff.ids),
        min(handoff.left_ms, wire.MAX_MS),
    )
    parts = [head, struct.pack(f"<{len(handoff.left)}I", *handoff.left), handoff.extras]
    if contact is not None:
        parts.append(
            wire.CONTACT_HEAD.pack(contact.prompt_len, contact.limit, len(contact.blob))
            + contact.blob
        )
    return b"".join([*parts, handoff.ids.astype("<i4").tobytes()])


def last_hop(row_tokens: int) -> int:
    """The last with which a visit may begin.

    Of two hops at the far side one commits a token, and each must fit into a baton word.
    """
    return MAX_HOP - min(2 * row_tokens + 2, MAX_HOP // 2)


def decode_handoff(frame: bytes, limits: Limits) -> Handoff:
    """The inverse, of either type. FrameError for anything else."""
    reader = _Reader(frame)
    _, flags, extras_len, models, session, hop, start, count, left_ms = reader.head(
        wire.HANDOFF_HEAD
    )
    _check(flags <= wire.EMPTY | wire.WITH_CONTACT, "unknown flags")
    _check(session <= wire.MAX_SESSION, "session out of range")
    _check(hop <= last_hop(limits.row_tokens), "too many hops")
    _check_span(start, count, limits)
    left = reader.left(models, limits)
    extras = reader.extras(extras_len)
    contact = reader.contact(limits) if flags & wire.WITH_CONTACT else None
    ids = reader.ids(count, limits)
    reader.end()
    return Handoff(
        session, hop, start, ids, left, extras, bool(flags & wire.EMPTY), left_ms, contact
    )


# -- answers -------------------------------------------------------------------------------------


def encode_answer(answer: Answer) -> bytes:
    """An ANSWER."""
    sources = answer.sources.astype(np.uint8).tobytes()
    one = len(set(sources)) == 1
    flags = wire.EMPTY * answer.empty | wire.ONE_SOURCE * one | wire.WITH_LEFT * bool(answer.left)
    records = answer.records
    head = wire.ANSWER_HEAD.pack(
        FrameType.ANSWER,
        flags,
        len(answer.extras),
        len(answer.left),
        answer.session,
        answer.hop,
        answer.start,
        len(answer.ids),
        min(answer.remote_ns // 1000, wire.MAX_MS),
        answer.cached,
        answer.destination,
        answer.finish,
        0 if records is None else records.words.shape[1],
    )
    parts = [
        head,
        struct.pack(f"<{len(answer.left)}I", *answer.left),
        sources[:1] if one else sources,
        answer.extras,
        answer.ids.astype("<i4").tobytes(),
    ]
    if records is not None:
        parts.append(wire.RECORDS_HEAD.pack(records.first, len(records.words)))
        parts.append(records.words.astype("<i4").tobytes())
    return b"".join(parts)


def decode_answer(frame: bytes, limits: Limits) -> Answer:
    """The inverse. FrameError for anything else."""
    reader = _Reader(frame)
    fields = reader.head(wire.ANSWER_HEAD)
    _, flags, extras_len, models, session, hop, start, count, *rest = fields
    remote_us, cached, destination, finish, words = rest
    _check(flags <= wire.EMPTY | wire.ONE_SOURCE | wire.WITH_LEFT, "unknown flags")
    _check(session <= wire.MAX_SESSION and hop <= MAX_HOP, "session or hop out of range")
    _check_span(start, count, limits)
    _check(destination == STAYS or destination < limits.models, "no such model")
    _check(finish in _FINISHES, "no such finish")
    _check(-1 <= cached <= limits.row_tokens, "cached tokens out of range")
    _check(bool(flags & wire.WITH_LEFT) == bool(models), "flags and lengths disagree")
    left = reader.left(models, limits) if models else ()
    sources = reader.sources(count, limits, one=bool(flags & wire.ONE_SOURCE))
    extras = reader.extras(extras_len)
    ids = reader.ids(count, limits)
    records = reader.records(words, limits) if words else None
    reader.end()
    return Answer(
        session,
        hop,
        start,
        ids,
        sources,
        destination,
        Finish(finish),
        extras,
        bool(flags & wire.EMPTY),
        cached,
        remote_us * 1000,
        left,
        records,
    )


def read_answer(frame: bytes, limits: Limits) -> Answer:
    """As :func:`decode_answer`, but where only the head can be read the answer says so."""
    try:
        return decode_answer(frame, limits)
    except FrameError as error:
        if len(frame) < wire.ANSWER_HEAD.size:
            raise
        _, _, _, _, session, hop, *_ = wire.ANSWER_HEAD.unpack_from(frame)
        none = np.zeros(0, np.uint8)
        return Answer(session, hop, 0, _NO_IDS, none, unreadable=str(error))


# -- the small ones ------------------------------------------------------------------------------


def encode_need(need: Need) -> bytes:
    """A NEED."""
    return wire.NEED_FRAME.pack(FrameType.NEED, need.hop, need.session, need.have)


def decode_need(frame: bytes, limits: Limits) -> Need:
    """The inverse. FrameError for anything else."""
    reader = _Reader(frame)
    _, hop, session, have = reader.head(wire.NEED_FRAME)
    reader.end()
    _check(session <= wire.MAX_SESSION and hop <= MAX_HOP, "session or hop out of range")
    _check(have <= limits.row_tokens, "more tokens than a row has")
    return Need(session, hop, have)


def encode_number(kind: FrameType, number: int) -> bytes:
    """An END of a session, a PING or a PONG."""
    return wire.SESSION_FRAME.pack(kind, number)


def decode_number(frame: bytes) -> int:
    """The inverse. FrameError for anything else."""
    reader = _Reader(frame)
    _, number = reader.head(wire.SESSION_FRAME)
    reader.end()
    _check(number <= wire.MAX_SESSION, "the number is out of range")
    return int(number)


def encode_status(*, up: bool, text: str) -> bytes:
    """A STATUS: whether the model can write, and if not, why."""
    return bytes((FrameType.STATUS, up)) + text.encode()[: wire.STATUS_BYTES]


def decode_status(frame: bytes) -> tuple[bool, str]:
    """The inverse. FrameError for anything else."""
    _check(2 <= len(frame) <= 2 + wire.STATUS_BYTES and frame[1] <= 1, "no status")
    return frame[1] == 1, frame[2:].decode("utf-8", "replace")


# -- checks --------------------------------------------------------------------------------------


def _check(sound: bool, complaint: str) -> None:
    if not sound:
        raise FrameError(complaint)


def _check_span(start: int, count: int, limits: Limits) -> None:
    _check(start + count <= limits.row_tokens, "more tokens than a row has")


class _Reader:
    """Takes the parts of a frame one after the other."""

    def __init__(self, frame: bytes) -> None:
        self._frame = frame
        self._at = 0

    def take(self, size: int) -> bytes:
        part = self._frame[self._at : self._at + size]
        _check(len(part) == size, "the frame is cut short")
        self._at += size
        return part

    def head(self, form: struct.Struct) -> tuple[int, ...]:
        return form.unpack(self.take(form.size))

    def left(self, models: int, limits: Limits) -> tuple[int, ...]:
        _check(models == limits.models, "another number of models")
        found = struct.unpack(f"<{models}I", self.take(4 * models))
        _check(max(found) <= limits.row_tokens, "a length beyond the longest row")
        return found

    def extras(self, size: int) -> bytes:
        _check(size <= wire.MAX_EXTRAS, "extras are too long")
        return self.take(size)

    def contact(self, limits: Limits) -> Contact:
        prompt_len, limit, size = self.head(wire.CONTACT_HEAD)
        _check(1 <= prompt_len <= limit <= limits.row_tokens, "prompt or limit out of range")
        _check(size <= PARAMS_BYTES, "parameters are too long")
        return Contact(prompt_len, limit, self.take(size))

    def ids(self, count: int, limits: Limits) -> Ids:
        if not count:
            return _NO_IDS
        ids = np.frombuffer(self.take(4 * count), "<i4")
        sound = int(ids.min()) >= 0 and int(ids.max()) < limits.tokenizer_size
        _check(sound, "ids beyond the tokenizer")
        return ids.astype(np.int32, copy=False)

    def sources(self, count: int, limits: Limits, *, one: bool) -> NDArray[np.uint8]:
        _check(count > 0 or not one, "a source without a token")
        found = np.frombuffer(self.take(1 if one else count), np.uint8)
        _check(not count or int(found.max()) < limits.models, "no such model")
        return np.repeat(found, count) if one else found

    def records(self, words: int, limits: Limits) -> Records:
        _check(words <= record_words(MAX_TOPS), "annotations are too long")
        first, count = self.head(wire.RECORDS_HEAD)
        _check_span(first, count, limits)
        found = np.frombuffer(self.take(4 * words * count), "<i4").astype(np.int32, copy=False)
        return Records(first, found.reshape(count, words))

    def end(self) -> None:
        _check(self._at == len(self._frame), "bytes behind the end of the frame")
