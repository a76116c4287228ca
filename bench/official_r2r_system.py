"""R2R's own way to run, as a system: two worker processes, and the controller between them.

A message between the workers goes, as in the original, through a ``multiprocessing`` queue to a
thread of the controller, over a ZeroMQ PUB/SUB pair to another thread of it, and through a second
queue to the other worker: three times pickled. The controller is this process, where the users are.

Not faithful, and all in favour of this baseline: the models are emulated (the original's eager
kernels, padded graphs and per-step device synchronisations are in nobody's latency profile), there
is one rank a model, and a worker that finds nothing sleeps for 100 us where the original polls
without end, which needs cores of its own. Knows what the workers say; not how they decode.
"""

from __future__ import annotations

import asyncio
import multiprocessing as mp
import os
import pickle
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from typing import Any, Final

import zmq

from bench.closed_loop import Counts, Record, Until, Window, measure
from bench.endpoint import NotAvailableError
from bench.official_r2r import HANDOFFS, OTHERS, OWN, SHUTDOWN, Message, News, Task
from bench.official_r2r_ends import HOST, PING, large_process, small_process
from bench.workloads import Workload

_PING_EVERY_S: Final = 0.02
_START_TIMEOUT_S: Final = 60.0
_END_TIMEOUT_S: Final = 5.0
_COUNTERS: Final = 3
_END: Final = None


class OfficialR2R:
    """The system: new processes for every measurement, since it cannot leave an answer.

    Args:
        models, profile: of emulated devices.
        p: the share of the small model's tokens that is routed.
    """

    def __init__(self, models: Sequence[str], profile: str | None, p: float) -> None:
        if profile is None:
            raise NotAvailableError("R2R's own way is there for emulated devices only")
        self._models = models
        self._profile = profile
        self._p = p

    async def measure(self, concurrency: int, workload: Workload, until: Until) -> Window:
        """As ``bench.systems.Running``."""
        with _controller(self._models, self._profile, self._p) as controller:
            await asyncio.to_thread(controller.wait_ready)
            controller.loop = asyncio.get_running_loop()
            return await measure(
                lambda number: _User(controller, workload, number, concurrency),
                controller,
                concurrency,
                until,
            )


class _User:
    def __init__(self, controller: Controller, workload: Workload, number: int, users: int) -> None:
        self._controller = controller
        self._workload = workload
        self._number = number
        self._users = users

    async def run(self, record: Record) -> None:
        """Ask without end."""
        for turn in range(1_000_000):
            question = self._workload.question(turn, self._number, self._users)
            task = Task(question.number, list(question.prompt), question.max_tokens)
            began = time.perf_counter()
            async for news in self._controller.ask(task):
                if news.token_ids is None:
                    record.first_token(began, news.at_s)
                else:
                    record.ended(began, news.at_s)


class Controller:
    """Gives requests to the small model's worker, and its news to who asked.

    Attributes:
        loop: of the users.
    """

    loop: asyncio.AbstractEventLoop

    def __init__(self, counters: Any, begun: Sequence[Event]) -> None:
        self._counters = counters
        self._begun = begun
        self._waiting: dict[int, asyncio.Queue[News]] = {}
        self._publisher: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUB)
        self._publisher.setsockopt(zmq.LINGER, 0)
        self.port: int = self._publisher.bind_to_random_port(HOST)

    def wait_ready(self) -> None:
        """Until both workers hear; what is published before is lost."""
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not all(begun.wait(_PING_EVERY_S) for begun in self._begun):
            if time.monotonic() > deadline:
                raise TimeoutError("R2R's workers did not start")
            self._publisher.send(PING)

    async def ask(self, task: Task) -> AsyncIterator[News]:
        """The news of ``task``, to its end."""
        news: asyncio.Queue[News] = asyncio.Queue()
        self._waiting[task.rid] = news
        try:
            self._publisher.send(pickle.dumps(task))
            while True:
                heard = await news.get()
                yield heard
                if heard.token_ids is not None:
                    return
        finally:
            del self._waiting[task.rid]

    def hear(self, news: list[News]) -> None:
        """From a thread: pass ``news`` on."""
        self.loop.call_soon_threadsafe(self._pass_on, news)

    def _pass_on(self, news: list[News]) -> None:
        for each in news:
            if (waiting := self._waiting.get(each.rid)) is not None:
                waiting.put_nowait(each)

    async def read(self) -> Counts:
        """As a ``Probe``."""
        own, others, handoffs = (self._counters[word] for word in (OWN, OTHERS, HANDOFFS))
        return Counts(time.perf_counter(), (own, others), handoffs)

    def close(self) -> None:
        """End the small model's worker."""
        self._publisher.send(pickle.dumps(SHUTDOWN))
        self._publisher.close(linger=1000)


class _Hop:
    """From a worker's queue to whoever ``deliver`` leads to: two threads and a PUB/SUB pair."""

    def __init__(self, source: Queue[Any], deliver: Callable[[Any], None]) -> None:
        self._source = source
        self._deliver = deliver
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._pub, self._sub = context.socket(zmq.PUB), context.socket(zmq.SUB)
        port = self._pub.bind_to_random_port(HOST)
        self._sub.connect(f"{HOST}:{port}")
        self._sub.subscribe(b"")
        while not self._sub.poll(int(1e3 * _PING_EVERY_S)):
            self._pub.send(PING)
        self._threads = [threading.Thread(target=each) for each in (self._send, self._receive)]
        for thread in self._threads:
            thread.start()

    def _send(self) -> None:
        while (item := self._source.get()) is not _END:
            self._pub.send(pickle.dumps(item))
        self._pub.send(pickle.dumps(_END))

    def _receive(self) -> None:
        while True:
            data = self._sub.recv()
            if data == PING:
                continue
            if (item := pickle.loads(data)) is _END:
                return
            self._deliver(item)

    def close(self) -> None:
        self._source.put(_END)
        for thread in self._threads:
            thread.join(_END_TIMEOUT_S)
        self._pub.close(linger=0)
        self._sub.close(linger=0)


@contextmanager
def _controller(models: Sequence[str], profile: str, p: float) -> Iterator[Controller]:
    """The workers with all that joins them; everything ends afterwards."""
    context = mp.get_context("spawn")
    counters = context.Array("q", _COUNTERS, lock=False)
    begun = context.Event(), context.Event()
    queues: list[Queue[Any]] = [context.Queue() for _ in range(5)]
    small_out, large_in, large_out, small_in, news = queues
    controller = Controller(counters, begun)
    parent = os.getpid()
    small = (parent, controller.port, begun[0], counters, small_in, small_out, news)
    large = (parent, begun[1], large_in, large_out)
    processes = [
        context.Process(target=small_process, args=(*small, profile, models[0], p), daemon=True),
        context.Process(target=large_process, args=(*large, profile, models[1]), daemon=True),
    ]
    for process in processes:
        process.start()
    hops = [
        _Hop(small_out, large_in.put),
        _Hop(large_out, small_in.put),
        _Hop(news, controller.hear),
    ]
    try:
        yield controller
    finally:
        large_in.put([Message(0, [], SHUTDOWN)])
        controller.close()
        for process in processes:
            process.join(_END_TIMEOUT_S)
            process.kill()
        for hop in hops:
            hop.close()
        for queue in queues:
            # What nobody will read must not keep this process from ending.
            queue.cancel_join_thread()
            queue.close()
