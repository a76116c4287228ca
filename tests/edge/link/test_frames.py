"""Frames: what is sent is read; whatever else comes is a FrameError, and nothing else is raised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trserve.edge import frames
from trserve.edge.cloud import STAYS, Answer, Records
from trserve.edge.frames import Contact, Handoff, Need
from trserve.edge.wire import MAX_SESSION, FrameError, FrameType, Limits
from trserve.ipc.baton import MAX_HOP, Finish
from trserve.ipc.layout import PARAMS_BYTES

LIMITS = Limits(row_tokens=64, tokenizer_size=1000, models=3)
SESSIONS, HOPS = st.integers(0, MAX_SESSION), st.integers(0, MAX_HOP)
EXTRAS = st.binary(max_size=64)
LENGTHS = st.tuples(*[st.integers(0, 64)] * 3)


def ids(most: int) -> st.SearchStrategy[Any]:
    return st.lists(st.integers(0, 999), max_size=most).map(lambda x: np.array(x, np.int32))


@st.composite
def handoffs(draw: Callable[..., Any]) -> Handoff:
    start = draw(st.integers(0, 40))
    prompt = draw(st.integers(1, 30))
    contact = Contact(prompt, draw(st.integers(prompt, 64)), draw(st.binary(max_size=PARAMS_BYTES)))
    return Handoff(
        session=draw(SESSIONS),
        hop=draw(st.integers(0, frames.last_hop(LIMITS.row_tokens))),
        start=start,
        ids=draw(ids(64 - start)),
        left=draw(LENGTHS),
        extras=draw(EXTRAS),
        empty=draw(st.booleans()),
        left_ms=draw(st.integers(0, 2**32 - 1)),
        contact=draw(st.sampled_from([None, contact])),
    )


@st.composite
def answers(draw: Callable[..., Any]) -> Answer:
    start = draw(st.integers(0, 40))
    tokens = draw(ids(64 - start))
    one = st.integers(0, 2).map(lambda model: np.full(len(tokens), model, np.uint8))
    each = st.lists(st.integers(0, 2), min_size=len(tokens), max_size=len(tokens))
    records = Records(start, np.arange(7 * len(tokens), dtype=np.int32).reshape(len(tokens), 7))
    return Answer(
        session=draw(SESSIONS),
        hop=draw(HOPS),
        start=start,
        ids=tokens,
        sources=draw(st.one_of(one, each.map(lambda x: np.array(x, np.uint8)))),
        destination=draw(st.sampled_from([0, 1, 2, STAYS])),
        finish=draw(st.sampled_from(Finish)),
        extras=draw(EXTRAS),
        empty=draw(st.booleans()),
        cached=draw(st.integers(-1, 64)),
        remote_ns=draw(st.integers(0, 2**31)) * 1000,
        left=draw(st.one_of(st.just(()), LENGTHS)),
        records=draw(st.sampled_from([None, records])),
    )


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Records) and isinstance(b, Records):
        return a.first == b.first and np.array_equal(a.words, b.words)
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    return bool(a == b)


@given(handoffs(), st.booleans())
def test_a_handoff_is_read_as_it_was_sent(handoff: Handoff, early: bool) -> None:
    frame = frames.encode_handoff(handoff, early=early)
    assert frames.kind_of(frame) is (FrameType.PREFILL if early else FrameType.HANDOFF)
    found = frames.decode_handoff(frame, LIMITS)
    assert all(same(a, b) for a, b in zip(handoff, found, strict=True))
    assert len(frame) <= LIMITS.frame_bytes


@given(answers())
def test_an_answer_is_read_as_it_was_sent(answer: Answer) -> None:
    frame = frames.encode_answer(answer)
    found = frames.decode_answer(frame, LIMITS)
    assert all(same(a, b) for a, b in zip(answer, found, strict=True))
    assert len(frame) <= LIMITS.frame_bytes


@given(SESSIONS, HOPS, st.integers(0, 64))
def test_the_small_frames(session: int, hop: int, have: int) -> None:
    need = Need(session, hop, have)
    assert frames.decode_need(frames.encode_need(need), LIMITS) == need
    assert frames.decode_number(frames.encode_number(FrameType.END, session)) == session
    assert frames.decode_status(frames.encode_status(up=False, text="why")) == (False, "why")


DECODERS: list[Callable[[bytes], Any]] = [
    lambda frame: frames.decode_handoff(frame, LIMITS),
    lambda frame: frames.decode_answer(frame, LIMITS),
    lambda frame: frames.decode_need(frame, LIMITS),
    frames.decode_number,
    frames.decode_status,
    frames.kind_of,
]


def check_refused_or_within_limits(frame: bytes) -> None:
    for decode in DECODERS:
        try:
            found = decode(frame)
        except FrameError:
            continue
        if isinstance(found, Handoff | Answer):
            assert found.start + len(found.ids) <= LIMITS.row_tokens
            assert not len(found.ids) or 0 <= found.ids.min() <= found.ids.max() < 1000
            assert found.hop <= MAX_HOP and found.session <= MAX_SESSION
            assert len(found.extras) <= 64
        if isinstance(found, Answer):
            assert len(found.sources) == len(found.ids)
            assert not len(found.sources) or found.sources.max() < 3


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(frame: bytes) -> None:
    check_refused_or_within_limits(frame)


@given(
    st.one_of(handoffs().map(frames.encode_handoff), answers().map(frames.encode_answer)), st.data()
)
def test_frames_that_were_tampered_with(frame: bytes, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(frame) - 1))
    for decode in DECODERS[:2]:
        with pytest.raises(FrameError):
            decode(frame[:cut])
        with pytest.raises(FrameError):
            decode(frame + b"\0")
    changed = bytearray(frame)
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    check_refused_or_within_limits(bytes(changed))


def test_a_handoff_and_its_answer_are_short() -> None:
    one = np.array([5], np.int32)
    handoff = Handoff(7, 3, 60, one, (60, 55), b"\x3c\0\0\0")
    answer = Answer(7, 3, 61, one, np.ones(1, np.uint8), 0, left=(60, 62), extras=b"\x3e\0\0\0")
    two = len(frames.encode_handoff(handoff)) + len(frames.encode_answer(answer))
    assert two <= 110
