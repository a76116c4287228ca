"""What routers cost: a call of ``route`` with its answer, beside the step that it follows.

- ``embedded``: every router on the embedded pair's small model, with the networks that ship.
- ``smollm2-135m``: every router on the shape of SmolLM2-135M (weights drawn at random, bfloat16,
  128 tokens of context a row), as a share of that model's forward pass, timed in the same run.
- ``official``: R2R's network at its published 56 million weights, float32, V = 151,936.
- ``signals``: entropy, largest probability and margin at V = 151,936, by the kernels and by torch.

Times are medians of calls over fresh positions in one process, one call after the other; networks
have random weights of the published sizes. ``least_us`` is how long the weights take to be read
once at the bandwidth that this run measured: no network is faster unless they stay in a cache.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from bench.common import Row, parser, report, track
from bench.engine import read_bandwidth
from bench.router_subjects import R2R_HIDDEN, Shape, routers, routing, step, write_network
from trserve.demo import model_path
from trserve.models.dummy import dummy_decoder
from trserve.models.loading import load_model
from trserve.models.native.library import CHOICE
from trserve.models.spec import ModelSpec, read_spec
from trserve.router_lib.signals import all_signals, largest_logits
from trserve.workers.kv_cache import KVCache
from trserve.workers.routing import Routing
from trserve.workers.runner import TorchRunner
from trserve.workers.step import StepInputs

BATCHES: Final = (1, 16)
CALLS: Final = 300
SECONDS: Final = 2.0
"""At most so long for one number."""
WARM_UP: Final = 10
CONTEXT: Final = 128
BLOCK: Final = 16
LARGE_VOCABULARY: Final = 151_936
EMBEDDED_TARGET_US: Final = 150.0
SHARE_TARGET: Final = 0.1
SMOLLM2: Final = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100_000.0,
    "tie_word_embeddings": True,
}


def median_us(call: Callable[[], Any], calls: int) -> float:
    """Of ``calls`` calls, or as many as fit in SECONDS."""
    for _ in range(WARM_UP if calls > WARM_UP else 1):
        call()
    times: list[float] = []
    end = time.perf_counter() + SECONDS
    while len(times) < calls and (len(times) < 3 or time.perf_counter() < end):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times)


def route_us(routed: Routing, shape: Shape, batch: int, calls: int) -> float:
    """A worker's call of the router, answer and all, at a position further on each time."""
    result = step(shape, batch, routed)

    def call() -> None:
        for request in result.requests:
            request.committed_len += 1  # type: ignore[misc]
        routed.destinations(result)

    return median_us(call, calls)


def forward_us(runner: TorchRunner, spec: ModelSpec, batch: int, calls: int) -> float:
    """A forward pass of ``batch`` decodes with CONTEXT tokens each."""
    blocks = CONTEXT // BLOCK + 1
    inputs = StepInputs(
        max_tokens=batch, max_rows=batch, max_blocks_per_row=blocks, block_size=BLOCK
    )
    for row in range(batch):
        table = np.arange(row * blocks, (row + 1) * blocks, dtype=np.int32)
        inputs.add_decode_row(row % spec.vocab_size, CONTEXT, table)
    return median_us(lambda: runner.forward(inputs), calls)


def of_model(
    part: str, runner: TorchRunner, shape: Shape, folder: Path, calls: int
) -> Iterator[Row]:
    """Every router beside the forward pass of a model."""
    spec = runner.decoder.spec
    forward = {batch: forward_us(runner, spec, batch, calls) for batch in BATCHES}
    shipped = part == "embedded"
    for name, routed in track(routers(shape, folder, shipped=shipped), f"routers, {part}"):
        for batch in BATCHES:
            cost = route_us(routed, shape, batch, calls)
            share = cost / forward[batch]
            yield {
                "part": part,
                "router": name,
                "batch": batch,
                "route_us": cost,
                "step_us": forward[batch],
                "share": share,
                "ok": cost <= EMBEDDED_TARGET_US if shipped else share <= SHARE_TARGET,
            }


def runner_of(spec: ModelSpec, path: Path | None, dtype: torch.dtype) -> TorchRunner:
    """A model with room for the largest batch; drawn at random without a ``path``."""
    decoder = load_model(path, spec, dtype=dtype) if path else dummy_decoder(spec, dtype=dtype)
    blocks = max(BATCHES) * (CONTEXT // BLOCK + 1)
    kv = KVCache(spec, num_blocks=blocks, block_size=BLOCK, dtype=dtype)
    return TorchRunner(decoder, kv, tokenizer_size=spec.vocab_size)


def embedded(folder: Path, calls: int) -> Iterator[Row]:
    """On the embedded pair's small model."""
    path = model_path("tiny")
    runner = runner_of(read_spec(path), path, torch.float32)
    spec = runner.decoder.spec
    shape = Shape(path, spec.hidden_size, spec.vocab_size, runner.decoder.embedding)
    yield from of_model("embedded", runner, shape, folder, calls)


def smollm2(folder: Path, calls: int) -> Iterator[Row]:
    """On the shape of SmolLM2-135M."""
    (folder / "config.json").write_text(json.dumps(SMOLLM2))
    runner = runner_of(read_spec(folder), None, torch.bfloat16)
    spec = runner.decoder.spec
    shape = Shape(folder, spec.hidden_size, spec.vocab_size, runner.decoder.embedding)
    yield from of_model("smollm2-135m", runner, shape, folder, calls)


def official(folder: Path, calls: int, bandwidth: float) -> Iterator[Row]:
    """R2R's network as it was published."""
    config = {**SMOLLM2, "hidden_size": R2R_HIDDEN, "num_attention_heads": 12}
    place = folder / "official"
    place.mkdir()
    (place / "config.json").write_text(json.dumps(config))
    embedding = torch.zeros(LARGE_VOCABULARY, R2R_HIDDEN, dtype=torch.bfloat16)
    shape = Shape(place, R2R_HIDDEN, LARGE_VOCABULARY, embedding)
    file = write_network("r2r", R2R_HIDDEN, place)
    routed = routing("r2r", shape, {"checkpoint": str(file), "model": str(place)})
    for batch in BATCHES:
        yield {
            "part": "official",
            "router": "r2r",
            "batch": batch,
            "route_us": route_us(routed, shape, batch, calls),
            "weights_bytes": file.stat().st_size,
            "least_us": 1e6 * file.stat().st_size / bandwidth,
        }


def signals(calls: int) -> Iterator[Row]:
    """One pass for three signals, and the largest logits, beside torch."""
    for batch in BATCHES:
        logits = 4.0 * torch.randn(batch, LARGE_VOCABULARY)
        yield _beside_torch("all three signals", batch, calls, all_signals, logits)
        yield _beside_torch("100 largest logits", batch, calls, largest_logits, logits, 100)


def _beside_torch(
    name: str, batch: int, calls: int, work: Callable[..., Any], logits: torch.Tensor, *more: int
) -> Row:
    call = partial(work, logits, LARGE_VOCABULARY, *more)
    row: Row = {"part": "signals", "router": name, "batch": batch}
    row["route_us"] = median_us(call, calls)
    chosen = os.environ.get(CHOICE, "")
    os.environ[CHOICE] = "none"
    row["torch_us"] = median_us(call, calls)
    os.environ[CHOICE] = chosen
    return row


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all parts and report."""
    made = parser("router_cost", "What a call of each router costs.")
    made.add_argument("--threads", type=int, default=1, help="of torch and of the kernels")
    args = made.parse_args(argv)
    calls = CALLS // 10 if args.quick else CALLS
    bandwidth = read_bandwidth(args.threads)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as made_folder, torch.inference_mode():
        folder = Path(made_folder)
        rows += embedded(folder, calls)
        rows += smollm2(folder, calls)
        rows += official(folder, calls, bandwidth)
        rows += signals(calls)
    title = f"Cost of route, {args.threads} threads, reading {bandwidth / 1e9:.1f} GB/s"
    report("router_cost", args, rows, title)
    missed = [f"{r['part']} {r['router']} at {r['batch']}" for r in rows if r.get("ok") is False]
    print(f"over the target: {', '.join(missed) or 'none'}")


if __name__ == "__main__":
    main()
