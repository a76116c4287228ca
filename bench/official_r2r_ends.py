"""The processes of R2R's two workers, and the ends of what joins them to others.

``HOST`` and ``PING`` are for both sides: a PUB/SUB pair loses what is sent before it is joined, so
pings are sent until one has come. Knows no controller and no users.
"""

from __future__ import annotations

import pickle
import signal
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from typing import Any, Final

import zmq

from bench.official_r2r import SHUTDOWN, Message, News, Task, run_large, run_small
from trserve.ipc.process import die_with_parent

HOST: Final = "tcp://127.0.0.1"
PING: Final = b""


def drained(queue: Queue[list[Message]]) -> list[Message]:
    """All messages of all lists that have come."""
    found: list[Message] = []
    while not queue.empty():
        found += queue.get()
    return found


class _SmallEnds:
    def __init__(
        self,
        tasks: zmq.Socket[bytes],
        begun: Event,
        counters: Any,
        inbox: Queue[list[Message]],
        outbox: Queue[list[Message]],
        news: Queue[list[News]],
    ) -> None:
        self.counters = counters
        self._tasks = tasks
        self._begun = begun
        self._inbox = inbox
        self._outbox = outbox
        self._news = news

    def tasks(self) -> list[Task] | None:
        found: list[Task] = []
        while self._tasks.poll(0):
            data = self._tasks.recv()
            if data == PING:
                self._begun.set()
                continue
            task = pickle.loads(data)
            if task == SHUTDOWN:
                return None
            found.append(task)
        return found

    def inbox(self) -> list[Message]:
        return drained(self._inbox)

    def send(self, messages: list[Message]) -> None:
        if messages:
            self._outbox.put(messages)

    def tell(self, news: list[News]) -> None:
        if news:
            self._news.put(news)


class _LargeEnds:
    def __init__(
        self, begun: Event, inbox: Queue[list[Message]], outbox: Queue[list[Message]]
    ) -> None:
        self._begun = begun
        self._inbox = inbox
        self._outbox = outbox

    def inbox(self) -> list[Message] | None:
        if not self._begun.is_set():
            self._begun.set()
        found = drained(self._inbox)
        return None if any(each.status == SHUTDOWN for each in found) else found

    def send(self, messages: list[Message]) -> None:
        if messages:
            self._outbox.put(messages)


def _begin(parent: int) -> None:
    die_with_parent(parent, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def small_process(
    parent: int,
    port: int,
    begun: Event,
    counters: Any,
    inbox: Queue[list[Message]],
    outbox: Queue[list[Message]],
    news: Queue[list[News]],
    profile: str,
    model: str,
    p: float,
) -> None:
    """The small model's worker, from its first act to its end."""
    _begin(parent)
    tasks: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
    tasks.connect(f"{HOST}:{port}")
    tasks.subscribe(b"")
    run_small(_SmallEnds(tasks, begun, counters, inbox, outbox, news), profile, model, p)
    _leave(tasks, outbox, news)


def _leave(tasks: zmq.Socket[bytes], *queues: Queue[Any]) -> None:
    tasks.close(linger=0)
    for queue in queues:
        queue.cancel_join_thread()


def large_process(
    parent: int,
    begun: Event,
    inbox: Queue[list[Message]],
    outbox: Queue[list[Message]],
    profile: str,
    model: str,
) -> None:
    """The large model's worker, from its first act to its end."""
    _begin(parent)
    run_large(_LargeEnds(begun, inbox, outbox), profile, model)
    outbox.cancel_join_thread()
