"""What it costs to run one model in two processes of one host: a step, a sum of theirs, a plan.

Steps: milliseconds a step of one model, the whole engine around it, at 1, 4 and 8 requests that
decode: in one process with compiled kernels and by torch alone, and in two ranks whose sums are in
shared memory and by gloo. Ranks compute by torch, so the second line is what they are to be
compared with. All of it shares the same cores and the same memory bandwidth: on one host's CPU two
ranks are not there to be faster, they are there so that everything around a GPU's ranks is run and
tested.

Sums: microseconds an all-reduce between two processes, of as many numbers as one or eight tokens
of a small and of a large model have. ``slept`` is of ranks that go to sleep for each other at once,
as they do where cores are short. Plans: microseconds that rank 0 takes to tell the other rank of a
step, whatever the context.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from bench.common import Row, parser, report, track
from trserve import Engine
from trserve.workers.tp.memory import GroupLayout, create_group_file
from trserve.workers.tp.waiting import LONG_SPIN

PROMPT_TOKENS: Final = 32
_LAYOUT: Final = GroupLayout(ranks=2, max_tokens=8, max_rows=8, table_width=8)
_SIZES: Final = {"192 (one token)": 192, "5120 (one token)": 5120, "40960 (eight tokens)": 40960}
_KINDS: Final = {"shared": LONG_SPIN, "shared, slept": 0, "gloo": -1}
"""How ranks add up, with the rounds that they stay awake for each other."""
_RANK_TIMEOUT_S: Final = 120.0
_SETTINGS: Final[Mapping[str, tuple[int, dict[str, str]]]] = {
    "1 process, compiled kernels": (1, {}),
    "1 process, torch": (1, {"TRSERVE_CPU_KERNELS": "none"}),
    "2 ranks, sums in shared memory": (2, {}),
    "2 ranks, sums by gloo": (2, {"TRSERVE_TP_SUMS": "gloo"}),
}


def measure_rank(rank: int, fd: int, kind: str, length: int, rounds: int) -> float:
    """Microseconds a sum of ``length`` float32 numbers, as ``rank`` of two sees them."""
    import torch

    from trserve.models.sharding import Collective
    from trserve.workers.tp.distributed import GlooGroup
    from trserve.workers.tp.memory import GroupMemory
    from trserve.workers.tp.shared_sum import SharedMemoryGroup

    torch.set_num_threads(1)
    group: Collective
    if kind == "gloo":
        group = GlooGroup(fd, rank, 2)
    else:
        group = SharedMemoryGroup(GroupMemory(fd, _LAYOUT, rank), spin=_KINDS[kind])
    x = torch.zeros(length)
    with torch.inference_mode():
        for _ in range(rounds // 10):
            group.all_reduce(x)
        began = time.perf_counter()
        for _ in range(rounds):
            group.all_reduce(x)
        found = (time.perf_counter() - began) / rounds * 1e6
    group.close()
    return found


def measure_sum(kind: str, length: int, rounds: int) -> float:
    """Microseconds a sum between two processes made for that."""
    fd = os.memfd_create("bench", 0) if kind == "gloo" else create_group_file(_LAYOUT)
    code = "import sys; from bench import tensor_parallel as t; n = map(int, sys.argv[2:]); "
    code += "rank, fd, *rest = n; print(t.measure_rank(rank, fd, sys.argv[1], *rest))"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code, kind, *map(str, (rank, fd, length, rounds))],
            pass_fds=[fd],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    try:
        return max(float(rank.communicate(timeout=_RANK_TIMEOUT_S)[0]) for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
        os.close(fd)


def measure_plan(context: int, rounds: int) -> float:
    """Microseconds that rank 0 takes to tell of eight decodes at ``context`` tokens each."""
    from trserve.ipc.doorbell import create_doorbell
    from trserve.workers.step import StepInputs
    from trserve.workers.tp.memory import GroupMemory
    from trserve.workers.tp.plan_ring import PlanWriter

    layout = GroupLayout(ranks=2, max_tokens=64, max_rows=8, table_width=2048)
    fd, bell = create_group_file(layout), create_doorbell()
    memory = GroupMemory(fd, layout, 0)
    step = StepInputs(max_tokens=64, max_rows=8, max_blocks_per_row=2048, block_size=16)
    for _ in range(8):
        step.add_row(np.array([1]), context, np.arange(2048, dtype=np.int32))
    writer, done = PlanWriter(memory, [bell], spin=0), memory.done_at(1)
    began = time.perf_counter()
    for number in range(1, rounds + 1):
        writer.tell(step, None)
        memory.words[done] = number  # as if the other rank had done it
    found = (time.perf_counter() - began) / rounds * 1e6
    os.close(fd)
    os.close(bell)
    return found


def measure_steps(args: Any, name: str) -> Iterator[Row]:
    """One row for each concurrency."""
    size, changes = _SETTINGS[name]
    before = {key: os.environ.get(key) for key in changes}
    os.environ.update(changes)  # the launcher's processes inherit it
    try:
        yield from _steps_of(args, name, size)
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


def _steps_of(args: Any, name: str, size: int) -> Iterator[Row]:
    settings = {"models": args.model, "dtype": args.dtype, "load_format": args.load_format}
    threads = (max(1, len(os.sched_getaffinity(0)) // size),)
    with Engine(**settings, tp=(size,), threads=threads, max_model_len=512) as engine:
        for count in (1, 4, 8):
            prompts = [[100 + row, *range(5, 4 + PROMPT_TOKENS)] for row in range(count)]
            options = {"max_tokens": args.output, "temperature": 0, "ignore_eos": True}
            run = partial(engine.generate, prompts, **options)
            run()
            best = min(_seconds(run) for _ in range(args.runs))
            yield {"setting": name, "requests": count, "step_ms": best / args.output * 1e3}


def _seconds(work: Any) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main(argv: Sequence[str] | None = None) -> None:
    """Measure sums, then steps, and report."""
    args = _arguments(argv)
    rows: list[Row] = []
    settings = [(kind, size) for kind in _KINDS for size in _SIZES]
    for kind, size in track(settings, "sums"):
        rounds = args.rounds // 10 if kind == "gloo" else args.rounds
        found = measure_sum(kind, _SIZES[size], rounds)
        rows.append({"setting": f"sum, {kind}", "numbers": size, "sum_us": found})
    for context in (100, 30_000):
        found = min(measure_plan(context, args.rounds) for _ in range(5))
        rows.append({"setting": f"plan, {context} tokens of context", "plan_us": found})
    for name in track(list(_SETTINGS), "steps"):
        rows.extend(measure_steps(args, name))
    report("tensor_parallel", args, rows, f"{args.model}, {args.dtype}")


def _arguments(argv: Sequence[str] | None) -> Any:
    made = parser("tensor_parallel", "One model in two processes on this host's CPU.")
    made.add_argument("--model", default="small", help="alias or checkpoint of the model")
    made.add_argument("--load-format", default="auto", help="dummy: weights drawn at random")
    made.add_argument("--dtype", default="float32", help="float32 or bfloat16")
    made.add_argument("--output", type=int, default=256, help="tokens per request")
    made.add_argument("--runs", type=int, default=3, help="runs, of which the best counts")
    made.add_argument("--rounds", type=int, default=5000, help="sums, a tenth of it for gloo")
    args = made.parse_args(argv)
    if args.quick:
        args.output, args.runs, args.rounds = 64, 1, 1000
    return args


if __name__ == "__main__":
    main()
