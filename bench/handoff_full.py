"""The whole handoff: from a router's decision at one worker to its rows in a step of the other.

Two worker processes run the product's own loop, table, routing, scheduler, outbox and rings over
one slab, as ``trserve.workers.main`` puts them together, with a model of no layers; this process
is the gateway. A batch of requests goes back and forth, all of it in one step, so that nobody
waits for a running step of the peer. Stamps are taken at the seams between the parts:

========  =======================================================================================
send      the router has decided → ``Routing.send`` and ``hand_off`` of every row are done
ring      → ``Outbox.flush`` has stored batons, descriptors and the ring's tail
wake      → the peer, asleep in epoll before, has silenced its bell
receive   → ring drained, every slot synchronised, ``receive`` called
schedule  → rows chosen, blocks at hand, the step's inputs filled (later than *runnable*)
========  =======================================================================================

``resume`` and ``re-prefill`` go from the wake to the router's next decision: with the KV that the
worker kept, and with all of it computed again (embeddings only, in a model of no layers, so that
this is the least that it can cost). Knows nothing of how the parts do their work.
"""

from __future__ import annotations

import gc
import itertools
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from bench.common import Row, track
from bench.handoff_stamps import (
    StampedConsumer,
    StampedProducer,
    Stamps,
    create_router,
    stamp_cycle,
    stamp_runner,
)
from bench.placement import Placement, placements
from trserve.gateway.slots import Slot, SlotTable
from trserve.ipc.baton import HOP_MASK, SlotState, unpack
from trserve.ipc.layout import Layout
from trserve.ipc.meter import MeterWriter
from trserve.ipc.publish import Outbox
from trserve.ipc.rings import RingConsumer, RingProducer
from trserve.ipc.shared import Shared
from trserve.ipc.slab import Slab
from trserve.ipc.tally import TallyWriter
from trserve.ipc.trace import TraceWriter
from trserve.params import RequestParams, SamplingParams, encode_params
from trserve.sched.table import ThresholdTable

if TYPE_CHECKING:
    from trserve.workers.loop import WorkerLoop

STAGES: Final = ("send", "ring", "wake", "receive", "schedule")
CONTEXTS: Final = (100, 30_000)
ROW_TOKENS: Final = 32_768
BLOCK: Final = 16
MAX_STEP_TOKENS: Final = 2048
COLD_HOPS: Final = 6
"""The first hops of a request compute its prompt at both workers, and gather the batch."""
GIVE_UP_S: Final = 120.0


@dataclass(frozen=True)
class Setting:
    """One world: how many requests travel together, where, and whether worker 0 keeps their KV."""

    batch: int
    placement: Placement
    keeps_kv: bool = True

    @property
    def layout(self) -> Layout:
        """The slab's."""
        return Layout(slots=self.batch, row_tokens=ROW_TOKENS, workers=2)


def _create_loop(
    setting: Setting, shared: Shared, index: int, control_fd: int, stamps: Stamps
) -> WorkerLoop:
    """A worker as ``trserve.workers.main`` creates it, with stamps between its parts."""
    import torch

    from trserve.models.aliases import resolve_model
    from trserve.models.loading import load_model
    from trserve.workers.blocks import BlockPool
    from trserve.workers.gating import WorkerGate
    from trserve.workers.kv_cache import KVCache
    from trserve.workers.loop import WorkerLoop
    from trserve.workers.memory import pending_with_blocks
    from trserve.workers.metering import WorkerMeter
    from trserve.workers.routing import Routing
    from trserve.workers.runner import TorchRunner
    from trserve.workers.sampler import Sampler
    from trserve.workers.step import StepInputs
    from trserve.workers.step_cycle import StepCycle, StepLimits
    from trserve.workers.table import RequestTable
    from trserve.workers.tracing import WorkerTrace

    torch.set_num_threads(1)
    model = resolve_model("zero-layer", "dummy")
    spec = replace(model.spec, max_position_embeddings=ROW_TOKENS)
    decoder = load_model(model.path, spec, dtype=torch.float32, load_format="dummy")
    num_blocks = 2 * setting.batch * ROW_TOKENS // BLOCK
    kv = KVCache(spec, num_blocks=num_blocks, block_size=BLOCK, dtype=torch.float32)
    slab = Slab(shared.slab_fd, setting.layout)
    producer = StampedProducer(slab.ring_words(index, 1 - index), stamps)
    rings = [
        StampedConsumer(slab.ring_words(1 - index, index), stamps),
        RingConsumer(slab.ring_words(setting.layout.gateway, index)),
    ]
    outbox = _StampedOutbox(slab, {1 - index: producer}, shared.bells, worker=index)
    pool = BlockPool(num_blocks, BLOCK, prefix_caching=setting.keeps_kv)
    table = RequestTable(slab, outbox, pool, index)
    meter = WorkerMeter(MeterWriter(slab, index), slab, index, lambda: math.nan)
    table.trace = WorkerTrace(TraceWriter(slab.trace_words(index)), meter)
    tally = TallyWriter(slab, index)
    runner = TorchRunner(decoder, kv, tokenizer_size=spec.vocab_size)
    stamp_runner(runner, stamps)
    cycle = StepCycle(
        index=index,
        slab=slab,
        table=table,
        routing=Routing(create_router(index, spec.vocab_size, stamps)),
        runner=runner,
        sampler=Sampler(index),
        inputs=StepInputs(
            max_tokens=MAX_STEP_TOKENS,
            max_rows=64,
            max_blocks_per_row=table.blocks_per_row,
            block_size=BLOCK,
        ),
        limits=StepLimits(64, MAX_STEP_TOKENS),
        tally=tally,
        meter=meter,
    )
    stamp_cycle(cycle, stamps)
    gate = WorkerGate(slab, index, shared.bells, thresholds=ThresholdTable.eager(2), max_rows=64)

    def drop_pending() -> None:
        for request in pending_with_blocks(table):
            table.drop_kv(request)

    outbox.stamps = stamps
    if not (setting.keeps_kv or index):
        outbox.afterwards = drop_pending

    return WorkerLoop(
        bell=shared.bells[index],
        rings=rings,
        control_fd=control_fd,
        on_control=lambda: not _has_ended(control_fd),
        launcher_fd=os.pidfd_open(os.getppid()),
        table=table,
        tally=tally,
        gate=gate,
        cycle=cycle,
        outbox=outbox,
        trace=table.trace,
    )


class _StampedOutbox(Outbox):
    """Stamps when results are published."""

    stamps: Stamps
    afterwards: Callable[[], None] | None = None

    def flush(self, *, hold: bool = False) -> None:
        """As any outbox."""
        self.stamps.flushing = time.monotonic_ns()
        super().flush(hold=hold)
        if self.afterwards is not None:
            self.afterwards()


def _has_ended(control_fd: int) -> bool:
    """Whether the gateway closed its end; the descriptor does not block."""
    try:
        return os.read(control_fd, 1) == b""
    except BlockingIOError:
        return False


def _work(
    setting: Setting, shared: Shared, index: int, control: tuple[int, int], results: Connection
) -> None:
    """A worker process, from its start to the end of the benchmark."""
    import torch

    os.close(control[1])
    setting.placement.pin(index)
    stamps = Stamps(setting.batch)
    loop = _create_loop(setting, shared, index, control[0], stamps)
    gc.collect()
    gc.freeze()
    results.send("ready")
    with torch.inference_mode():
        loop.run()
    results.send((stamps.sent, stamps.taken))


class World:
    """Two workers, and this process as their gateway."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self._shared = Shared.create(setting.layout)
        self._control = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        context = multiprocessing.get_context("fork")
        self._workers: list[Any] = []
        self._results: list[Connection] = []
        for index in range(2):
            ours, theirs = context.Pipe()
            arguments = (setting, self._shared, index, self._control, theirs)
            self._workers.append(context.Process(target=_work, args=arguments, daemon=True))
            self._workers[-1].start()
            theirs.close()
            self._results.append(ours)
        os.close(self._control[0])
        for results in self._results:
            results.recv()
        slab = self._slab = Slab(self._shared.slab_fd, setting.layout)
        gateway = setting.layout.gateway
        rings = {worker: RingProducer(slab.ring_words(gateway, worker)) for worker in range(2)}
        self._slots = SlotTable(slab, Outbox(slab, rings, self._shared.bells))
        self._contexts: dict[int, int] = {}

    def play(self, context: int, hops: int) -> None:
        """Let a fresh batch, each row of ``context`` tokens, be handed off ``hops`` times."""
        greedy = SamplingParams(temperature=0.0, ignore_eos=True)
        blob = encode_params(RequestParams(sampling=greedy, admit=False))
        slots = []
        for row in range(self.setting.batch):
            prompt = (np.arange(context) * 31 + row * 7) % 1000 + 3
            slots.append(self._slots.publish(prompt.tolist(), blob, limit=ROW_TOKENS, entry=0))
        # One after the other: the first may be alone in the first steps, until all are there.
        self._contexts.update({slot.gen: context for slot in slots})
        self._wait(lambda: self._hop(slots[0]) >= COLD_HOPS + hops, "their handoffs")
        for slot in slots:
            self._slots.cancel(slot)
            self._slots.release(slot)
        self._wait(self._all_free, "the end of a batch")

    def _all_free(self) -> bool:
        self._slots.collect()
        return not self._slots.num_closing

    def _hop(self, slot: Slot) -> int:
        word = self._slab.baton[slot.index]
        if unpack(word).state is not SlotState.LIVE:
            raise RuntimeError(f"a request of the benchmark ended by itself: {unpack(word)}")
        return word & HOP_MASK

    def _wait(self, done: Any, what: str) -> None:
        deadline = time.monotonic() + GIVE_UP_S
        while not done():
            if time.monotonic() > deadline or not all(w.is_alive() for w in self._workers):
                raise RuntimeError(f"the workers of the benchmark do not come to {what}")
            time.sleep(0.005)

    def end(self) -> list[tuple[int, int, dict[str, int]]]:
        """Stop the workers; (context, worker that received, ns by stage) of every handoff."""
        os.close(self._control[1])
        found = [results.recv() for results in self._results]
        for worker in self._workers:
            worker.join()
        for fd in (self._shared.slab_fd, *self._shared.bells):
            os.close(fd)
        handoffs = []
        for receiver, (_, taken) in enumerate(found):
            sent = found[1 - receiver][0]
            for key in sorted(taken.keys() & sent.keys()):
                if key[1] > COLD_HOPS:
                    stages = _stages(sent[key], taken[key])
                    handoffs.append((self._contexts[key[0]], receiver, stages))
        return handoffs


def _stages(sent: tuple[int, int, int], taken: tuple[int, int, int, int]) -> dict[str, int]:
    times = (*sent, *taken[:3])
    stages = {stage: times[at + 1] - times[at] for at, stage in enumerate(STAGES)}
    return {**stages, "total": times[-1] - times[0], "resume": taken[3] - taken[0]}


def full_handoffs(handoffs: int, segments: int) -> Iterator[Row]:
    """Rows of the second table, for batches of 1 and 16 and every placement."""
    for batch, placement in track([*itertools.product((1, 16), placements())], "whole"):
        setting = Setting(batch, placement)
        world = World(setting)
        for _ in range(segments):
            for context in CONTEXTS:  # interleaved: what else the machine does hits both
                world.play(context, -(-handoffs // segments))
        found = world.end()
        for context in CONTEXTS:
            those = [stages for at, _, stages in found if at == context]
            for stage in (*STAGES, "total"):
                yield _row("full", setting, context, [s[stage] for s in those], stage=stage)
        if batch == 1:
            yield from _resumes("resume", setting, found)


def re_prefills(handoffs: int) -> Iterator[Row]:
    """The same of a request whose KV worker 0 gives up at every handoff."""
    setting = Setting(1, placements()[-1], keeps_kv=False)
    world = World(setting)
    for context in CONTEXTS:
        world.play(context, handoffs)
    yield from _resumes("re-prefill", setting, world.end())


def _resumes(
    path: str, setting: Setting, found: Sequence[tuple[int, int, dict[str, int]]]
) -> Iterator[Row]:
    for context in CONTEXTS:
        ours = [s["resume"] for at, receiver, s in found if at == context and receiver == 0]
        yield _row(path, setting, context, ours)


def _row(path: str, setting: Setting, context: int, times_ns: Sequence[int], **more: Any) -> Row:
    p50, p99 = (float(value) / 1000 for value in np.percentile(times_ns, (50, 99)))
    named = {"path": path, "placement": str(setting.placement), "batch": setting.batch}
    named |= {"context": context, **more}
    return {**named, "p50_us": p50, "p99_us": p99, "n": len(times_ns)}
