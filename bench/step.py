"""What a worker's step costs beside the model: the runtime's own time, at three batch sizes.

One worker's real loop, table, rings, slab and runner in this process, on the `zero-layer` model
(embedding, norm and head; vocabulary 1,024, one thread), with N requests that decode until their
row of 512 tokens is full. Each turn of the loop is timed as a whole: drain, choose, forward,
sample, route, commit, publish, and the note of the step in the trace. Prompts and the turns in
which requests start or end are left out; new blocks, which each row needs every 16 steps (not all
at once, their prompts having different lengths), and their entries in the prefix cache are in.

``host_us`` is the turn without the time inside tensor calls, taken in the same turns by wrapping
them: ``TorchRunner.forward``, the router's ``route``, and in the sampler the arithmetic over
[B, V] (arg max; softmax weights, filters and cumulative sum; the search in it). Everything else is
host time: Python, epoll, doorbells, arrays of one entry a row, random numbers, and the timers
themselves. Nothing sleeps: with something to run the loop only polls.

``none`` runs in a layout of one model; ``r-stitch`` in one of two, with tau = 1, at which nothing
leaves. Each column is the median over all steps; ``*_best_us`` is the lowest median of a round
(a fresh set of requests), which says more where other processes use the machine.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, product
from typing import Any, Final

import numpy as np
import torch

from bench.common import Row, parser, report, track
from trserve.gateway.slots import Slot, SlotTable
from trserve.ipc.doorbell import create_doorbell
from trserve.ipc.layout import Layout
from trserve.ipc.publish import Outbox
from trserve.ipc.rings import RingConsumer, RingProducer
from trserve.ipc.shared import Shared
from trserve.ipc.slab import Slab
from trserve.ipc.tally import TallyWriter
from trserve.ipc.trace import TraceWriter
from trserve.models.aliases import ZERO_LAYER, alias_spec
from trserve.models.dummy import dummy_decoder
from trserve.params import RequestParams, SamplingParams, encode_params
from trserve.router_lib.base import RouterContext
from trserve.sched.table import ThresholdTable
from trserve.workers.blocks import BlockPool
from trserve.workers.gating import WorkerGate
from trserve.workers.kv_cache import KVCache
from trserve.workers.loop import WorkerLoop
from trserve.workers.routing import Routing, create_router
from trserve.workers.runner import TorchRunner
from trserve.workers.sampler import Sampler
from trserve.workers.step import StepInputs
from trserve.workers.step_cycle import StepCycle, StepLimits
from trserve.workers.table import RequestTable
from trserve.workers.tracing import WorkerTrace

BATCHES: Final = (1, 8, 64)
SLOTS: Final = 256
MAX_ROWS: Final = 64
MAX_TOKENS: Final = 2048
BLOCK_SIZE: Final = 16
ROW_TOKENS: Final = 512
PROMPT_TOKENS: Final = 24
SETTLING_TURNS: Final = 10
TURNS: Final = ROW_TOKENS - PROMPT_TOKENS - 2 * SETTLING_TURNS
ROUNDS: Final = 6
QUICK_ROUNDS: Final = 2
NEVER_DRAWN: Final = 24
"""Ids at the end of the vocabulary that the tokenizer lacks: end ids to look for and never find."""


class Stopwatch:
    """Adds up the time inside the calls that it wraps."""

    def __init__(self) -> None:
        self.total = 0.0

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call``, timed."""
        clock = time.perf_counter

        def timed(*args: Any, **named: Any) -> Any:
            start = clock()
            try:
                return call(*args, **named)
            finally:
                self.total += clock() - start

        return timed


class Rig:
    """Worker 0 of a server with ``models`` models, and the gateway's side of its slab."""

    def __init__(self, router: str, models: int) -> None:
        layout = Layout(slots=SLOTS, row_tokens=ROW_TOKENS, workers=models)
        shared = Shared.create(layout)
        slab = Slab(shared.slab_fd, layout)
        self.slots = SlotTable(slab, _outbox(slab, shared.bells, None))
        self.stopwatch = Stopwatch()
        self.control = create_doorbell()
        self.launcher = os.pipe()
        self.vocabulary = alias_spec(ZERO_LAYER).vocab_size - NEVER_DRAWN
        self._shared = shared
        self._taken: list[Slot] = []
        self.table, self.turn = self._create(slab, router)

    def _create(self, slab: Slab, router: str) -> tuple[RequestTable, Callable[[], bool]]:
        bells, layout = self._shared.bells, slab.layout
        num_blocks = SLOTS * ROW_TOKENS // BLOCK_SIZE
        outbox = _outbox(slab, bells, 0)
        table = RequestTable(slab, outbox, BlockPool(num_blocks, BLOCK_SIZE), 0)
        table.trace = WorkerTrace(TraceWriter(slab.trace_words(0)))
        models = tuple(f"m{index}" for index in range(layout.workers))
        config = {"tau": 1.0} if router == "r-stitch" else {}
        made = create_router(router, RouterContext(0, models, self.vocabulary, config))
        made.route = self.stopwatch.wrap(made.route)  # type: ignore[method-assign]
        tally = TallyWriter(slab, 0)
        cycle = StepCycle(
            index=0,
            slab=slab,
            table=table,
            routing=Routing(made),
            runner=self._runner(num_blocks),
            sampler=self._sampler(),
            inputs=StepInputs(
                max_tokens=MAX_TOKENS,
                max_rows=MAX_ROWS,
                max_blocks_per_row=table.blocks_per_row,
                block_size=BLOCK_SIZE,
            ),
            limits=StepLimits(MAX_ROWS, MAX_TOKENS),
            tally=tally,
        )
        eager = ThresholdTable.eager(layout.workers)
        loop = WorkerLoop(
            bell=bells[0],
            rings=[RingConsumer(slab.ring_words(p, 0)) for p in range(1, layout.workers + 1)],
            control_fd=self.control,
            on_control=lambda: True,
            launcher_fd=self.launcher[0],
            table=table,
            tally=tally,
            cycle=cycle,
            gate=WorkerGate(slab, 0, bells, thresholds=eager, max_rows=MAX_ROWS),
            outbox=outbox,
            trace=table.trace,
        )
        return table, loop.turn

    def _runner(self, num_blocks: int) -> TorchRunner:
        spec = alias_spec(ZERO_LAYER)
        decoder = dummy_decoder(spec, dtype=torch.float32)
        kv = KVCache(spec, num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype=torch.float32)
        runner = TorchRunner(decoder, kv, tokenizer_size=self.vocabulary)
        runner.forward = self.stopwatch.wrap(runner.forward)  # type: ignore[method-assign]
        return runner

    def _sampler(self) -> Sampler:
        sampler = Sampler(0)
        for name in ("largest", "cumulate", "find"):
            setattr(sampler, name, self.stopwatch.wrap(getattr(sampler, name)))
        return sampler

    def submit(self, count: int, temperature: float, seed: int) -> None:
        """Publish ``count`` requests that run until their rows are full."""
        shape = (count, PROMPT_TOKENS)
        prompts = np.random.default_rng(seed).integers(0, self.vocabulary, shape).tolist()
        for row, prompt in enumerate(prompts):
            params = RequestParams(
                sampling=SamplingParams(
                    temperature=temperature, seed=seed + row, eos_token_ids=(self.vocabulary,)
                )
            )
            blob = encode_params(params)
            # Of different lengths, so that not all of them begin a block in the same step.
            prompt = prompt[row % BLOCK_SIZE :]
            self._taken.append(self.slots.publish(prompt, blob, limit=ROW_TOKENS, entry=0))

    def finish(self) -> None:
        """Let what is left run to its end, and take the slots back."""
        while self.table.runnable:
            self.turn()
        while self._taken:
            self.slots.release(self._taken.pop())
        self.slots.collect()

    def close(self) -> None:
        """Close what is open."""
        shared = self._shared
        for fd in (shared.slab_fd, *shared.bells, self.control, *self.launcher):
            os.close(fd)


def _outbox(slab: Slab, bells: Sequence[int], worker: int | None) -> Outbox:
    producer = slab.layout.gateway if worker is None else worker
    others = [w for w in range(slab.layout.workers) if w != producer]
    rings = {other: RingProducer(slab.ring_words(producer, other)) for other in others}
    return Outbox(slab, rings, bells, worker=worker)


@contextmanager
def rig(router: str) -> Iterator[Rig]:
    """A rig for ``router``, in the smallest layout that it works in."""
    made = Rig(router, 1 if router == "none" else 2)
    try:
        yield made
    finally:
        made.close()


def time_round(bench: Rig, batch: int, temperature: float, seed: int) -> list[tuple[float, float]]:
    """(whole, host) microseconds of each turn in which ``batch`` requests decode."""
    bench.submit(batch, temperature, seed)
    for _ in range(SETTLING_TURNS):
        bench.turn()
    found, watch, clock = [], bench.stopwatch, time.perf_counter
    for _ in range(TURNS):
        watch.total = 0.0
        start = clock()
        bench.turn()
        whole = clock() - start
        found.append((1e6 * whole, 1e6 * (whole - watch.total)))
    assert len(bench.table.runnable) == batch, "a request ended while it was timed"
    bench.finish()
    return found


def measure(router: str, batch: int, sampling: str, rounds: int) -> Row:
    """One row of the table."""
    temperature = 0.0 if sampling == "greedy" else 1.0
    with rig(router) as bench, torch.inference_mode():
        gc.collect()
        gc.freeze()
        times = [time_round(bench, batch, temperature, 1000 * (n + 1)) for n in range(rounds)]
        gc.unfreeze()
    whole, host = ([[turn[at] for turn in each] for each in times] for at in (0, 1))
    return {
        "batch": batch,
        "sampling": sampling,
        "router": router,
        "whole_us": statistics.median(chain.from_iterable(whole)),
        "host_us": statistics.median(chain.from_iterable(host)),
        "whole_best_us": min(map(statistics.median, whole)),
        "host_best_us": min(map(statistics.median, host)),
        "whole_target_us": 60.0 + 3.5 * batch,
        "host_target_us": 30.0 + 2.0 * batch,
        "steps": sum(map(len, whole)),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure every combination and report."""
    args = parser("step", "What a worker's step costs beside the model.").parse_args(argv)
    torch.set_num_threads(1)
    rounds = QUICK_ROUNDS if args.quick else ROUNDS
    settings = [("none", "greedy"), ("none", "sampled"), ("r-stitch", "greedy")]
    rows = [
        measure(router, batch, sampling, rounds)
        for (router, sampling), batch in track([*product(settings, BATCHES)], "settings")
    ]
    report("step", args, rows, f"One step of zero-layer, one thread, {rounds} rounds")


if __name__ == "__main__":
    main()
