"""Frames whose ids travel by NCCL: parted and whole again, and whatever is none of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.edge.link.test_frames import answers, handoffs
from trserve.edge import frames, nccl_frames
from trserve.edge.wire import FrameError

ENCODED = st.one_of(handoffs().map(frames.encode_handoff), answers().map(frames.encode_answer))


@given(ENCODED, st.integers(0, 2**63))
def test_what_was_parted_is_whole_again(frame: bytes, number: int) -> None:
    parts = nccl_frames.part(number, frame)
    if parts is None:
        return
    parted = nccl_frames.decode_parted(parts[0])
    assert parted.number == number and len(parts[1]) == 4096
    assert nccl_frames.whole(parted, parts[1]) == frame
    assert nccl_frames.session_of(parted.rest) == nccl_frames.session_of(frame)


@given(ENCODED, st.data())
def test_messages_that_were_tampered_with_are_refused(frame: bytes, data: st.DataObject) -> None:
    parts = nccl_frames.part(5, frame)
    if parts is None:
        return
    parted, message = nccl_frames.decode_parted(parts[0]), bytearray(parts[1])
    used = 12 + 4 * parted.num_ids
    at = data.draw(st.integers(0, used - 1).map(lambda n: n if n < 12 else n + 4))
    message[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(FrameError):
        nccl_frames.whole(parted, bytes(message))


def refused_or(frame: bytes) -> None:
    for decode in (
        nccl_frames.decode_parted,
        nccl_frames.decode_offer,
        nccl_frames.decode_fault,
        nccl_frames.session_of,
        nccl_frames.ids_behind,
        lambda frame: nccl_frames.part(1, frame),
    ):
        try:
            decode(frame)
        except FrameError:
            continue


@given(st.one_of(st.binary(max_size=200), st.integers(0, 17).map(lambda k: bytes([k]) * 60)))
def test_random_bytes_are_refused(frame: bytes) -> None:
    refused_or(frame)


@given(ENCODED, st.data())
def test_parted_frames_that_were_tampered_with(frame: bytes, data: st.DataObject) -> None:
    parts = nccl_frames.part(1, frame)
    if parts is None:
        return
    changed = bytearray(parts[0])
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    refused_or(bytes(changed))
    refused_or(bytes(changed[: data.draw(st.integers(0, len(changed)))]))
