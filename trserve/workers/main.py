"""A worker process from its first act to its end: load one model, serve it, leave.

Puts the parts together; each of them knows less than this file. torch is imported only after the
process is tied to the launcher, because it takes more than a second.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from trserve.gpus.worker_side import device_report, hold_device
from trserve.ipc.child import (
    ChildArguments,
    begin_child,
    parse_child_arguments,
    say_hello,
)
from trserve.ipc.child_run import run_child
from trserve.ipc.control import ControlClient, worker_identity
from trserve.ipc.links import ShmMedium, open_outbox, receivers
from trserve.ipc.meter import MeterWriter
from trserve.ipc.slab import Slab
from trserve.ipc.tally import TallyWriter
from trserve.ipc.trace import TraceWriter
from trserve.plan import ServerPlan
from trserve.sched.table import ThresholdTable
from trserve.workers.device_links import (
    DeviceLinks,
    SourceReader,
    links_of,
    open_device_links,
)

if TYPE_CHECKING:
    from trserve.router_lib.base import BaseRouter
    from trserve.workers.blocks import BlockPool
    from trserve.workers.gates import Gate
    from trserve.workers.loop import WorkerLoop
    from trserve.workers.recorder import Recorder
    from trserve.workers.routing import Routing
    from trserve.workers.runner import Runner
    from trserve.workers.table import RequestTable

log = logging.getLogger(__name__)
_PROGRESS_EVERY_S = 0.5
_GRAPHS_ON_CPU = "graphs-on-cpu"
"""``TRSERVE_RUNNER=graphs-on-cpu``: the GPU's runner on the CPU, its graphs emulated; for tests."""


def _create_runner(
    plan: ServerPlan, arguments: ChildArguments, control: ControlClient, leaving: ExitStack
) -> Runner:
    index = arguments.index
    if plan.profile is not None:
        from trserve.emulated.runner import create_runner

        return create_runner(plan, index)
    if plan.device == "onnx":
        from trserve.edge.onnx import runner

        return runner.create_runner(plan, index, _progress(control))
    if plan.models[index].tp > 1:
        from trserve.workers.tp import joining

        place = joining.Place(plan, index, arguments.rank, arguments.group_fds)
        first = joining.create_runner(place, _progress(control))
        leaving.callback(first.close)
        return first
    if plan.device == "cuda" or os.environ.get("TRSERVE_RUNNER") == _GRAPHS_ON_CPU:
        from trserve.workers.cuda import create

        graphed = create.create_runner(plan, index, _progress(control))
        leaving.callback(graphed.close)
        return graphed
    import torch

    from trserve.models.loading import load_model
    from trserve.models.spec import read_spec
    from trserve.workers.kv_cache import KVCache
    from trserve.workers.runner import TorchRunner

    model = plan.models[index]
    torch.set_num_threads(model.threads)
    spec = read_spec(Path(model.path))
    dtype: torch.dtype = getattr(torch, model.dtype)
    decoder = load_model(
        Path(model.path),
        spec,
        dtype=dtype,
        load_format=model.load_format,
        int8=model.int8,
        progress=_progress(control),
        token_map=model.token_map,
    )
    kv = KVCache(spec, num_blocks=model.num_blocks, block_size=plan.block_size, dtype=dtype)
    return TorchRunner(decoder, kv, tokenizer_size=plan.tokenizer_size)


def _progress(control: ControlClient) -> Callable[[int, int], None]:
    last = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= _PROGRESS_EVERY_S:
            last = time.monotonic()
            control.send({"type": "progress", "done": done, "total": total})

    return report


def _create_loop(
    arguments: ChildArguments,
    plan: ServerPlan,
    runner: Runner,
    control: ControlClient,
    leaving: ExitStack,
) -> WorkerLoop:
    from trserve.router_lib.target_share import share_control
    from trserve.workers.blocks import BlockPool
    from trserve.workers.gates import create_gate
    from trserve.workers.grammar import create_grammars
    from trserve.workers.loop import WorkerLoop
    from trserve.workers.metering import WorkerMeter
    from trserve.workers.news import News
    from trserve.workers.routing import Routing
    from trserve.workers.sampler import Sampler
    from trserve.workers.step import StepInputs
    from trserve.workers.step_cycle import StepCycle, StepLimits
    from trserve.workers.table import RequestTable
    from trserve.workers.tracing import WorkerTrace

    index, model = arguments.index, plan.models[arguments.index]
    slab = Slab(arguments.slab_fd, plan.layout)
    link_names = links_of(plan, index, runner)
    router = _prepare_runner(plan, index, runner, reads_sources=bool(link_names))
    links = open_device_links(plan, slab, index, link_names, leaving)
    medium = links.medium if links else ShmMedium(slab)
    outbox = open_outbox(slab, arguments.bells, index, medium)
    if plan.edge_slots:
        outbox.also_ring(plan.edge_port, plan.slots)
    pool = BlockPool(model.num_blocks, plan.block_size, prefix_caching=plan.prefix_caching)
    table = RequestTable(slab, outbox, pool, index)
    table.news = News(slab, [i for i, each in enumerate(plan.models) if each.remote])
    inputs = StepInputs(
        max_tokens=plan.max_tokens,
        max_rows=plan.max_rows,
        max_blocks_per_row=table.blocks_per_row,
        block_size=plan.block_size,
    )
    tallies = [slab.tally_words(worker) for worker in range(len(plan.models))]
    routing = Routing(router, share_control(router, tallies))
    bounds_s = plan.endpoint.handoff_buckets_s
    meter = WorkerMeter(MeterWriter(slab, index, bounds_s), slab, index, lambda: routing.threshold)
    table.trace = WorkerTrace(TraceWriter(slab.trace_words(index)), meter)
    tally = TallyWriter(slab, index)
    gate = create_gate(plan, slab, index, arguments.bells, table.trace)
    cycle = StepCycle(
        index=index,
        slab=slab,
        table=table,
        routing=routing,
        runner=runner,
        sampler=Sampler(index),
        inputs=inputs,
        limits=StepLimits(plan.max_rows, plan.max_tokens),
        tally=tally,
        recorder=_create_recorder(plan, index),
        early_prefill=plan.early_prefill == "always",
        grammars=create_grammars(plan),
        meter=meter,
    )
    slab.workers[index].set("total_blocks", model.num_blocks)
    ready = {"type": "ready", "router_parameters": routing.describe()}
    control.send(ready | device_report(plan.device))
    if links:
        links.find_suffixes(slab, index, table, runner, plan.max_tokens)
        links.offer(control)
    return WorkerLoop(
        bell=arguments.bells[index],
        rings=receivers(medium, plan.layout, index),
        control_fd=control.fd,
        on_control=lambda: _on_control(control, gate, index, pool, routing, table, links),
        launcher_fd=arguments.launcher_fd,
        table=table,
        tally=tally,
        cycle=cycle,
        gate=gate,
        outbox=outbox,
        trace=table.trace,
    )


def _prepare_runner(
    plan: ServerPlan, index: int, runner: Runner, *, reads_sources: bool
) -> BaseRouter:
    """Make ``runner`` ready for steps, graphs included; returns the router that decides on them."""
    from trserve.workers.in_step import DecidingRunner
    from trserve.workers.runner import keep_tap

    router = _create_router(plan, index, runner)
    if router.reads_tap:
        keep_tap(runner)
    if reads_sources and isinstance(runner, SourceReader):
        runner.read_sources()
    if isinstance(runner, DecidingRunner):
        runner.prepare(router)
    return router


def _create_router(plan: ServerPlan, index: int, runner: Runner) -> BaseRouter:
    from trserve.router_lib.base import RouterContext
    from trserve.workers.routing import create_router
    from trserve.workers.runner import embedding_of

    context = RouterContext(
        model=index,
        models=tuple(model.name for model in plan.models),
        tokenizer_size=plan.tokenizer_size,
        config=plan.router_config,
        path=plan.models[index].path,
        embedding=embedding_of(runner),
    )
    return create_router(plan.router, context)


def _create_recorder(plan: ServerPlan, index: int) -> Recorder | None:
    from trserve.workers.recorder import Recorder

    if plan.record is None:
        return None
    return Recorder(Path(plan.record.directory), plan.record.headers[index], plan.max_rows)


def _on_control(
    control: ControlClient,
    gate: Gate,
    index: int,
    pool: BlockPool,
    routing: Routing,
    table: RequestTable,
    links: DeviceLinks | None,
) -> bool:
    """Take in all messages; False once the worker is to end.

    An answer can swallow the socket's next edge, so it is looked at until nothing is left.
    """
    while messages := control.receive_all():
        for message in messages:
            kind = message["type"]
            if kind == "stop":
                return False
            if kind == "thresholds":
                gate.use(ThresholdTable.from_rows(message["models"], message["rows"]))
            elif kind == "drain":
                gate.draining = True
            elif kind == "router_config":
                routing.configure(message["values"])
                table.version += 1  # rows that are kept from step to step hold the old values
            elif kind == "confirm":
                control.send({"type": "confirmed", "number": message["number"], "model": index})
            elif kind == "link_offer" and links:
                links.accept(control, message)
            elif kind == "flush_cache":
                pool.forget_cached()
                answer = {"type": "cache_flushed", "number": message["number"], "model": index}
                control.send(answer)
    return True


def _prepare(arguments: ChildArguments, control: ControlClient, leaving: ExitStack) -> WorkerLoop:
    plan = msgspec.convert(say_hello(control), ServerPlan)
    if held := hold_device(plan.device, arguments.parent):
        leaving.callback(held.finish)
    runner = _create_runner(plan, arguments, control, leaving)
    loop = _create_loop(arguments, plan, runner, control, leaving)
    # Whatever is alive now stays: the collector need never walk the model again.
    gc.collect()
    gc.freeze()
    return loop


def main() -> int:
    """Load, serve, leave; returns the exit code."""
    arguments = parse_child_arguments()
    begin_child(arguments)
    control = ControlClient(arguments.control, worker_identity(arguments.index))
    leaving = ExitStack()

    def prepare() -> Callable[[], None]:
        loop = _prepare(arguments, control, leaving)
        return lambda: _run(loop, leaving)

    return run_child(control, "this worker", prepare)


def _run(loop: WorkerLoop, leaving: ExitStack) -> None:
    import torch

    with torch.inference_mode():
        loop.run()
    leaving.close()  # not after an error: the launcher ends the other ranks, and says why


if __name__ == "__main__":
    sys.exit(main())
