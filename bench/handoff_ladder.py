"""One-way latency of a handoff between two processes, by what carries it.

Two processes play ping-pong with handoffs of 1 to 64 tokens; each carries the time at which its
sender began (``CLOCK_MONOTONIC``, the same in all processes of a machine), and the receiver takes
the difference once it could use the tokens. Both directions count. A message is made within the
measured time (the pickling counts); for shared memory there is none to make, because the tokens
lie in their row since they were committed, whether a handoff follows or not. Paths that sleep are
measured with both processes on one core and with a core each; ``eventfd-wake`` is what the kernel
and the machine take of that, with nothing else done. The whole handoff, with what the router and
the request table do, is the second table. Knows no worker and no model.
"""

from __future__ import annotations

import itertools
import mmap
import multiprocessing
import os
import pickle
import select
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Final, Protocol

import numpy as np
import zmq
from numpy.typing import NDArray

from bench.common import Row, track
from bench.handoff_http import measure_http
from bench.placement import Placement, placements
from trserve.ipc.baton import LENGTH_SHIFT, Finish, SlotState, pack
from trserve.ipc.doorbell import silence
from trserve.ipc.fence import load_fence
from trserve.ipc.layout import Layout
from trserve.ipc.publish import Outbox
from trserve.ipc.rings import Descriptor, Kind, RingConsumer, RingProducer
from trserve.ipc.shared import Shared
from trserve.ipc.slab import Slab

WARM_UP: Final = 500
MAX_TOKENS: Final = 64
SLOTS: Final = 256
GIVE_UP_S: Final = 30.0
_STAMP_WORDS: Final = 2  # of int32, before the tokens

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]


class End(Protocol):
    """One process's end of a path."""

    def send(self, tokens: Int32Array) -> None:
        """Hand ``tokens`` over, with the time at which this call began."""

    def receive(self) -> int:
        """Wait for a handoff; returns the nanoseconds since its sender began."""


class SlabEnd:
    """Shared memory, by the product's own slab, outbox, rings and doorbells.

    Worker ``index`` of two; one slot's row carries the payload, its baton names the receiver.
    """

    def __init__(self, shared: Shared, layout: Layout, index: int, *, sleeps: bool) -> None:
        slab = Slab(shared.slab_fd, layout)
        self._peer = 1 - index
        self._producer = RingProducer(slab.ring_words(index, self._peer))
        self._ring = RingConsumer(slab.ring_words(self._peer, index))
        self._outbox = Outbox(slab, {self._peer: self._producer}, shared.bells, worker=index)
        self._baton = slab.baton
        self._row = slab.tokens[0]
        self._stamp = memoryview(self._row[:_STAMP_WORDS]).cast("B").cast("q")
        self._bell = shared.bells[index]
        self._hop = index
        self._poller = select.epoll()
        self._poller.register(self._bell, select.EPOLLIN)
        self._wait = self._sleep if sleeps else self._poll

    def send(self, tokens: Int32Array) -> None:
        length = _STAMP_WORDS + len(tokens)
        self._row[_STAMP_WORDS:length] = tokens
        self._hop = hop = self._hop + 2 & 0xFFFF
        word = pack(length, self._peer, SlotState.LIVE, Finish.NONE, 0, hop)
        descriptor = Descriptor(Kind.RUN, 0, 1, hop)
        self._stamp[0] = time.monotonic_ns()
        self._outbox.store_baton(0, word)
        self._outbox.send(self._peer, descriptor)
        self._outbox.flush()

    def receive(self) -> int:
        (found,) = self._wait()
        word = self._baton[found.slot]
        load_fence()
        suffix = self._row[_STAMP_WORDS : word >> LENGTH_SHIFT]
        passed = time.monotonic_ns() - self._stamp[0]
        assert len(suffix) <= MAX_TOKENS
        return passed

    def _poll(self) -> list[Descriptor]:
        drain = self._ring.drain
        while True:
            for _ in range(2**22):  # a second or so
                if found := drain():
                    return found
            _check_parent()

    def _sleep(self) -> list[Descriptor]:
        while self._poller.poll(GIVE_UP_S):
            silence(self._bell)
            if found := self._ring.drain():
                return found
        raise TimeoutError(f"no handoff within {GIVE_UP_S:g} s")


class WakeEnd:
    """An eventfd, and the time of the write in shared memory: the floor of whatever sleeps."""

    def __init__(self, stamp: memoryview, bells: tuple[int, int], index: int) -> None:
        self._stamp = stamp
        self._own, self._peer = bells[index], bells[1 - index]
        self._poller = select.epoll()
        self._poller.register(self._own, select.EPOLLIN)

    def send(self, tokens: Int32Array) -> None:
        self._stamp[0] = time.monotonic_ns()
        os.eventfd_write(self._peer, 1)

    def receive(self) -> int:
        if not self._poller.poll(GIVE_UP_S):
            raise TimeoutError(f"no wake within {GIVE_UP_S:g} s")
        passed = time.monotonic_ns() - self._stamp[0]
        os.eventfd_read(self._own)
        return passed


def _check_parent() -> None:
    if os.getppid() == 1:
        raise RuntimeError("the other process of the benchmark ended")


class ZmqEnd:
    """A ZeroMQ pair over ipc: the bytes of the stamp and the tokens."""

    def __init__(self, endpoint: str, index: int) -> None:
        self._socket = zmq.Context().socket(zmq.PAIR)
        self._socket.setsockopt(zmq.RCVTIMEO, int(GIVE_UP_S * 1000))
        self._socket.setsockopt(zmq.LINGER, 0)
        if index == 0:
            self._socket.bind(endpoint)
        else:
            self._socket.connect(endpoint)

    def send(self, tokens: Int32Array) -> None:
        stamp = np.array([time.monotonic_ns()])
        self._socket.send(stamp.tobytes() + tokens.tobytes())

    def receive(self) -> int:
        message = self._socket.recv()
        stamp = int(np.frombuffer(message, np.int64, 1)[0])
        suffix = np.frombuffer(message, np.int32, offset=8)
        passed = time.monotonic_ns() - stamp
        assert len(suffix) <= MAX_TOKENS
        return passed


@dataclass
class EngineRequest:
    """What engines send per request: the fields of a usual one, most of them at their defaults."""

    request_id: str
    token_ids: list[int]
    started_ns: int
    sampling: dict[str, Any] = field(
        default_factory=lambda: {"temperature": 0.7, "top_p": 0.95, "max_tokens": 512, "seed": 1}
    )
    arrival_time: float = 0.0
    eos_token_id: int = 2
    priority: int = 0
    lora_id: str | None = None


@dataclass
class EngineOutput:
    """What engines send back per step and request."""

    request_id: str
    token_ids: list[int]
    started_ns: int
    finish_reason: str | None = None
    logprobs: list[float] | None = None
    num_cached_tokens: int = 0
    events: list[str] = field(default_factory=list)


class PickleEnd(ZmqEnd):
    """The usual engine path: a dataclass with its list of tokens, pickled, over ZeroMQ."""

    def __init__(self, endpoint: str, index: int) -> None:
        super().__init__(endpoint, index)
        self._message = EngineOutput if index else EngineRequest

    def send(self, tokens: Int32Array) -> None:
        started = time.monotonic_ns()
        message = self._message("cmpl-4f1c0e5d2b9a47d8", tokens.tolist(), started)
        self._socket.send(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def receive(self) -> int:
        message = pickle.loads(self._socket.recv())
        passed = time.monotonic_ns() - int(message.started_ns)
        assert len(message.token_ids) <= MAX_TOKENS
        return passed


class QueueEnd:
    """``multiprocessing.Queue``, one each way."""

    def __init__(self, queues: Any, index: int) -> None:
        self._out, self._in = queues[index], queues[1 - index]

    def send(self, tokens: Int32Array) -> None:
        self._out.put((time.monotonic_ns(), tokens.tolist()))

    def receive(self) -> int:
        started, tokens = self._in.get(timeout=GIVE_UP_S)
        passed = time.monotonic_ns() - int(started)
        assert len(tokens) <= MAX_TOKENS
        return passed


def _play(end: End, rounds: int, *, starts: bool) -> Int64Array:
    """One side of the ping-pong: ``rounds`` handoffs sent and as many received."""
    rng = np.random.default_rng(int(starts))
    sizes = rng.integers(1, MAX_TOKENS + 1, rounds).tolist()
    source = rng.integers(0, 2**31 - 1, MAX_TOKENS, dtype=np.int32)
    payloads = [source[:size] for size in range(MAX_TOKENS + 1)]
    waited = np.zeros(rounds, np.int64)
    for at, size in enumerate(sizes):
        if starts:
            end.send(payloads[size])
        waited[at] = end.receive()
        if not starts:
            end.send(payloads[size])
    return waited


def _other_side(
    create: Callable[[int], End], rounds: int, placement: Placement, results: Connection
) -> None:
    placement.pin(1)
    results.send(_play(create(1), rounds, starts=False))
    results.close()


def _ping_pong(create: Callable[[int], End], handoffs: int, placement: Placement) -> Int64Array:
    """Nanoseconds of ``handoffs`` handoffs, half of them each way, after a warm-up."""
    rounds = WARM_UP + handoffs // 2
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    arguments = (create, rounds, placement, theirs)
    other = context.Process(target=_other_side, args=arguments, daemon=True)
    other.start()
    theirs.close()
    with placement.pinned(0):
        waited = _play(create(0), rounds, starts=True)
        waited_there = ours.recv()
    other.join()
    return np.concatenate((waited[WARM_UP:], waited_there[WARM_UP:]))


Create = Callable[[int], End]


def _sleeping(stack: ExitStack) -> dict[str, Callable[[], Create]]:
    """Makers of both ends of the paths that sleep, fresh ones for each measurement."""
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="trserve-bench-"))
    names = itertools.count()

    def endpoint() -> str:
        return f"ipc://{folder}/{next(names)}"

    return {
        "eventfd-wake": lambda: _wake(stack),
        "shm-doorbell": lambda: _slab(stack, sleeps=True),
        "zmq": lambda: partial(ZmqEnd, endpoint()),
        "zmq-pickle": lambda: partial(PickleEnd, endpoint()),
    }


def _slab(stack: ExitStack, *, sleeps: bool) -> Create:
    layout = Layout(slots=SLOTS, row_tokens=_STAMP_WORDS + MAX_TOKENS, workers=2)
    shared = Shared.create(layout)
    for fd in (shared.slab_fd, *shared.bells):
        stack.callback(os.close, fd)
    return partial(SlabEnd, shared, layout, sleeps=sleeps)


def _wake(stack: ExitStack) -> Create:
    stamp = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("q")
    bells = os.eventfd(0, os.EFD_NONBLOCK), os.eventfd(0, os.EFD_NONBLOCK)
    for fd in bells:
        stack.callback(os.close, fd)
    return partial(WakeEnd, stamp, bells)


def ladder(handoffs: int) -> list[Row]:
    """One row a path and placement; pollers have a core each, or one would wait for the other."""
    context = multiprocessing.get_context("fork")
    queues: list[Any] = [context.Queue(), context.Queue()]
    with ExitStack() as stack:
        found = [("shm-poll", placements()[-1], _slab(stack, sleeps=False))]
        for path, make in _sleeping(stack).items():
            found += [(path, placement, make()) for placement in placements()]
        found.append(("mp-queue", Placement.ANY, partial(QueueEnd, queues)))
        rows = [
            _row(path, placement, _ping_pong(create, handoffs, placement))
            for path, placement, create in track(found, "paths")
        ]
    return [*rows, _row("http", Placement.ANY, measure_http(WARM_UP, handoffs))]


def _row(path: str, placement: Placement, waited_ns: Int64Array) -> Row:
    p50, p99 = (float(value) / 1000 for value in np.percentile(waited_ns, (50, 99)))
    named = {"path": path, "placement": str(placement)}
    return {**named, "p50_us": p50, "p99_us": p99, "n": len(waited_ns)}
