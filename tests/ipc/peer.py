"""The other process of the two-process tests: ``python -m tests.ipc.peer ROLE ARGUMENTS``.

Prints one line of JSON about what it saw. Every wait in it ends.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Callable

from trserve.ipc.baton import SlotState, unpack
from trserve.ipc.child import ChildArguments, begin_child
from trserve.ipc.doorbell import ring, silence
from trserve.ipc.fence import load_fence
from trserve.ipc.instance import InstanceDirectory
from trserve.ipc.layout import TRACE_RECORD_WORDS, Layout
from trserve.ipc.process import die_with_parent
from trserve.ipc.rings import Descriptor, Kind, RingConsumer, RingProducer
from trserve.ipc.slab import Slab
from trserve.ipc.trace import EventKind, TraceWriter

GIVE_UP_S = 60.0
BELT_S = 1.0
SLOWEST = 20_000.0
"""Descriptors a second that the slowest machine sends and reads."""


def descriptor(number: int) -> Descriptor:
    """The one that is sent as the ``number``-th; every field depends on the number."""
    return Descriptor(
        Kind(number % len(Kind)), number * 7919 % 2**24, number, number * 104729 % 2**22
    )


def token(position: int) -> int:
    return position * 2654435761 % 2**31


def _slab(fd: str, layout: str) -> Slab:
    return Slab(int(fd), Layout(*json.loads(layout)))


def _consume(fd: str, layout: str, count: str) -> dict[str, int]:
    """Takes descriptors from the gateway's ring, in order, until ``count`` have come."""
    slab = _slab(fd, layout)
    consumer = RingConsumer(slab.ring_words(slab.layout.gateway, 0))
    expected, wrong, deadline = 0, 0, time.monotonic() + GIVE_UP_S + int(count) / SLOWEST
    while expected < int(count) and time.monotonic() < deadline:
        for found in consumer.drain():
            wrong += found != descriptor(expected)
            expected += 1
        os.sched_yield()
    return {"received": expected, "wrong": wrong}


def _pong(fd: str, layout: str, own_bell: str, other_bell: str, count: str) -> dict[str, int]:
    slab = _slab(fd, layout)
    consumer = RingConsumer(slab.ring_words(0, 1))
    producer = RingProducer(slab.ring_words(1, 0))
    ends = (consumer, producer, int(own_bell), int(other_bell))
    return play(*ends, range(0, 2 * int(count), 2), starts=False)


def play(
    consumer: RingConsumer,
    producer: RingProducer,
    own_bell: int,
    other_bell: int,
    numbers: range,
    *,
    starts: bool,
) -> dict[str, int]:
    """One side of a ping-pong in which each waits for the other's bell before it answers."""
    poller = select.epoll()
    poller.register(own_bell, select.EPOLLIN)
    seen = {"received": 0, "wrong": 0, "missed": 0}
    for number in numbers:
        if starts:
            producer.push([descriptor(number)])
            ring(other_bell)
        if not _await_one(consumer, poller, own_bell, seen, number + starts):
            return seen
        if not starts:
            producer.push([descriptor(number + 1)])
            ring(other_bell)
    return seen


def _await_one(
    consumer: RingConsumer,
    poller: select.epoll,
    bell: int,
    seen: dict[str, int],
    number: int,
) -> bool:
    for _ in range(int(GIVE_UP_S / BELT_S)):
        woken = bool(poller.poll(BELT_S))
        silence(bell)
        found = consumer.drain()
        seen["received"] += len(found)
        if found:
            seen["wrong"] += found != [descriptor(number)]
            seen["missed"] += not woken
            return True
    return False


def _read_row(fd: str, layout: str) -> dict[str, int]:
    """Checks the tokens under every length that it sees, until the row is DONE."""
    slab = _slab(fd, layout)
    position, wrong, looks, deadline = 0, 0, 0, time.monotonic() + GIVE_UP_S
    while time.monotonic() < deadline:
        word = slab.baton[0]
        load_fence()
        baton = unpack(word)
        row = slab.tokens[0, position : baton.length].tolist()
        wrong += sum(row[at] != token(position + at) for at in range(len(row)))
        looks += bool(row)
        position = baton.length
        if baton.state is SlotState.DONE:
            break
    return {"length": position, "wrong": wrong, "looks": looks}


def _hold_instance() -> dict[str, int]:
    directory = InstanceDirectory()
    print(directory.path, flush=True)
    sys.stdin.read()
    return {}


def _sleeper(parent: str) -> dict[str, int]:
    die_with_parent(int(parent))
    print(os.getpid(), flush=True)
    select.select([], [], [], GIVE_UP_S)
    return {}


def _parent() -> dict[str, int]:
    """Starts a sleeper and waits to be killed."""
    import subprocess

    command = [sys.executable, "-m", "tests.ipc.peer", "sleeper", str(os.getpid())]
    with subprocess.Popen(command) as child:
        child.wait(GIVE_UP_S)
    return {}


def _patient(parent: str) -> dict[str, int]:
    """A child that answers each line until its input ends."""
    begin_child(ChildArguments(int(parent), -1, "ipc:///nowhere", -1, (), index=0))
    print("ready", flush=True)
    for line in sys.stdin:
        print(line.strip(), flush=True)
    return {}


def traced_gen(position: int) -> int:
    """What the traced event of a position says; every bit depends on the position."""
    return position * 0x9E3779B97F4A7C15 & 2**63 - 1


def _trace(fd: str, layout: str, count: str) -> dict[str, int]:
    """Notes events without a pause."""
    slab = _slab(fd, layout)
    writer = TraceWriter(slab.trace_words(0))
    first = len(slab.trace_words(0)) // TRACE_RECORD_WORDS
    for position in range(first, first + int(count)):
        writer.note(EventKind.STEP, position & 0xFFFF, gen=traced_gen(position))
    return {"noted": int(count)}


ROLES: dict[str, Callable[..., dict[str, int]]] = {
    "consume": _consume,
    "pong": _pong,
    "read-row": _read_row,
    "hold-instance": _hold_instance,
    "sleeper": _sleeper,
    "parent": _parent,
    "patient": _patient,
    "trace": _trace,
}

if __name__ == "__main__":
    print(json.dumps(ROLES[sys.argv[1]](*sys.argv[2:])))
