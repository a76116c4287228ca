"""Shared memory between two real processes: order, wake-ups, and tokens under a seen length."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import astuple
from typing import Any

from tests.ipc.memory import Memory, memory
from tests.ipc.peer import GIVE_UP_S, descriptor, play, token
from trserve.ipc.baton import Finish, SlotState, pack
from trserve.ipc.rings import RingConsumer, RingProducer


def start(shared: Memory, role: str, *arguments: object) -> subprocess.Popen[str]:
    layout = json.dumps(astuple(shared.layout))
    return subprocess.Popen(
        [sys.executable, "-m", "tests.ipc.peer", role, str(shared.fd), layout]
        + [str(argument) for argument in arguments],
        pass_fds=(shared.fd, *shared.bells),
        stdout=subprocess.PIPE,
        text=True,
    )


def report(peer: subprocess.Popen[str]) -> Any:
    out, _ = peer.communicate(timeout=GIVE_UP_S)
    assert peer.returncode == 0
    return json.loads(out)


def test_descriptors_arrive_in_order_and_whole(full: bool) -> None:
    count = 10_000_000 if full else 200_000
    with memory(slots=100, workers=1) as shared:
        peer = start(shared, "consume", count)
        slab = shared.slab()
        producer = RingProducer(slab.ring_words(shared.layout.gateway, 0))
        sent, size = 0, 1
        while sent < count and peer.poll() is None:
            batch = [descriptor(n) for n in range(sent, min(sent + size, count))]
            if producer.push(batch):
                sent += len(batch)
                size = size % 61 + 1
            else:
                os.sched_yield()
        assert report(peer) == {"received": count, "wrong": 0}


def test_no_wake_up_is_ever_missed(full: bool) -> None:
    rounds = 200_000 if full else 20_000
    with memory(slots=2, workers=2) as shared:
        peer = start(shared, "pong", shared.bells[1], shared.bells[0], rounds)
        slab = shared.slab()
        seen = play(
            RingConsumer(slab.ring_words(1, 0)),
            RingProducer(slab.ring_words(0, 1)),
            shared.bells[0],
            shared.bells[1],
            range(0, 2 * rounds, 2),
            starts=True,
        )
        whole = {"received": rounds, "wrong": 0, "missed": 0}
        assert (seen, report(peer)) == (whole, whole)


def test_tokens_lie_under_every_length_that_is_seen(full: bool) -> None:
    """A writer that never pauses: two, then one, then three tokens a commit, and so on."""
    length = 1_000_000 if full else 150_000
    with memory(slots=1, row_tokens=length, workers=1) as shared:
        slab = shared.slab()
        slab.baton[0] = pack(0, 0, SlotState.LIVE, Finish.NONE, 0, 0)
        peer = start(shared, "read-row")
        outbox = shared.outbox(slab, 0)
        at = 0
        while at < length:
            end = min(at + 1 + (at * 7 >> 3) % 3, length)
            slab.tokens[0, at:end] = [token(position) for position in range(at, end)]
            state, finish = (
                (SlotState.DONE, Finish.LENGTH) if end == length else (SlotState.LIVE, Finish.NONE)
            )
            outbox.store_baton(0, pack(end, 0, state, finish, 0, 0))
            outbox.flush()
            at = end
        seen = report(peer)
        assert (seen["length"], seen["wrong"]) == (length, 0)
        assert seen["looks"] > 0
