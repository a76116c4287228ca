"""The engine on a device: graphs equal eager launches, tokens equal the CPU engine's, step times.

Mandatory are equalities; times are judged by the numbers of the issue and told either way.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from bench.gpu_stages.models import (
    PIECES,
    Rows,
    decide_step,
    decoder_of,
    runner_of,
    step_ms,
)
from bench.gpu_stages.parts import Parts
from trserve.models.aliases import resolve_model
from trserve.models.loading import load_model
from trserve.models.spec import ModelSpec, read_spec
from trserve.router_lib.signals import normalized_entropy
from trserve.workers.cuda.host_time import measure_host_time
from trserve.workers.cuda.runner import CudaRunner
from trserve.workers.in_step import StepAsk
from trserve.workers.kv_cache import KVCache
from trserve.workers.row_sampling import greedy
from trserve.workers.runner import TorchRunner
from trserve.workers.sampler import RowSampling

GAP: Final = 1e-4
"""Logits that are nearer than this may be ordered either way in float32."""

MOST_SCORE_ERROR: Final = 1e-4
MOST_HOST_US: Final = 150.0
MOST_OF_BANDWIDTH: Final = 1.3
_PAIR: Final = ("tiny", "small")
_SHOWN: Final = 5
_ROWS: Final = 8
_MOST_ROWS: Final = 24
_GIB: Final = 2**30


def engine(device: str, quick: bool) -> dict[str, Any]:
    """See the module."""
    where = torch.device(device, 0) if device == "cuda" else torch.device("cpu")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    steps = 16 if quick or device == "cpu" else 64
    small = "0.6b" if device == "cuda" else "tiny"
    parts = Parts()
    golden = [
        parts.run(f"golden_{name}", partial(golden_equality, where, name, steps)) for name in _PAIR
    ]
    replay = parts.run("replay", lambda: replay_equals_eager(where, small, steps))
    large = parts.run("large_step", lambda: large_step(where)) if device == "cuda" else None
    host = parts.run("host", lambda: host_time(where, 200 if quick else 1000))
    times = parts.run("step_times", lambda: step_times(where, small, quick))
    parts.run("bfloat16", lambda: bfloat16_share(where, steps))
    found = parts.found
    found["tables"] = {"steps": [row for row in (times, large) if row is not None]}
    equal = sum(each["compared"] for each in golden if each)
    found["summary"] = (
        f"{equal} tokens equal the CPU engine's, {replay['compared'] if replay else 0} equal eager "
        f"ones; host {host['p50_us'] if host else math.nan:.0f} us a step of {_ROWS}"
    )
    if device == "cpu":
        found["summary"] = "EMULATED graphs: " + found["summary"]
    if failures := _failures(golden, replay, found.get("failed", {})):
        found["error"] = "; ".join(failures)
    return found


def _failures(
    golden: Sequence[dict[str, Any] | None], replay: dict[str, Any] | None, failed: dict[str, str]
) -> list[str]:
    found = [f"{part}: {error}" for part, error in failed.items()]
    if any(each and each["different"] for each in golden):
        found.append("tokens of the device differ from the CPU engine's")
    if replay and replay["different"]:
        found.append("steps of graphs differ from those of eager launches")
    if replay and not replay["largest_score_difference"] <= MOST_SCORE_ERROR:
        found.append("the router's scores in the graph are not those of torch")
    return found


def golden_equality(
    device: torch.device, name: str, steps: int, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Greedy tokens of an embedded model on ``device`` and by the CPU engine in float32.

    In another ``dtype`` some differ, and which share does is all that can be said.
    """
    attention = "triton" if device.type == "cuda" else "torch"
    decoder = decoder_of(name, device, dtype, dummy=False)
    runner = runner_of(decoder, _ROWS, attention=attention)
    reference = _cpu_runner(name)
    lengths = [5, 17, 16, 33, 40, 1, 64, 90]
    rows = [Rows(_ROWS, decoder.spec.vocab_size, 3, lengths) for _ in range(2)]
    ask = StepAsk(greedy(_ROWS), np.full(_ROWS, 0.5, np.float32))
    compared, ties, wrong, worst = 0, 0, [], 0.0
    for number in range(steps):
        output = decide_step(runner, rows[0], ask)
        tokens = [row[-1] for row in rows[0].tokens]
        logits = reference.forward(rows[1].next_step()).logits[:_ROWS]
        vocabulary = decoder.spec.vocab_size
        apart = output.logits[:_ROWS, :vocabulary].cpu() - logits[:, :vocabulary]
        worst = float(np.maximum(worst, apart.abs().max().item()))  # NaN stays
        best = logits.topk(2, -1)
        for row, token in enumerate(tokens):
            near = float(best.values[row, 0] - best.values[row, 1]) < GAP
            ties += near
            compared += not near
            if not near and token != int(best.indices[row, 0]):
                gap = float(logits[row].max() - logits[row, token])
                length = len(rows[0].tokens[row])
                wrong.append({"step": number, "row": row, "length": length, "gap": gap})
        rows[1].append(tokens)
    runner.close()
    return {
        "compared": compared,
        "ties": ties,
        "different": len(wrong),
        "attention": attention,
        "largest_logit_difference": worst,
        "first_different": wrong[:_SHOWN],
    }


def bfloat16_share(device: torch.device, steps: int) -> dict[str, float]:
    """Of each embedded model's tokens in bfloat16, the share that equals the CPU engine's."""
    shares: dict[str, float] = {}
    for name in _PAIR:
        found = golden_equality(device, name, steps, torch.bfloat16)
        shares[name] = 1 - found["different"] / max(found["compared"], 1)
    return shares


def host_time(device: torch.device, steps: int) -> dict[str, Any]:
    """What the host does for a step of 8 rows, beside the wait for the device."""
    found = measure_host_time(_ROWS, steps, device=device)
    within = found.p50_us <= MOST_HOST_US
    return {"p50_us": found.p50_us, "p99_us": found.p99_us, "within_150_us": within}


def _cpu_runner(name: str) -> TorchRunner:
    model = resolve_model(name)
    spec = read_spec(model.path)
    decoder = load_model(model.path, spec, dtype=torch.float32)
    kv = KVCache(spec, num_blocks=_ROWS * 128, block_size=16, dtype=torch.float32)
    return TorchRunner(decoder, kv, tokenizer_size=spec.vocab_size)


def replay_equals_eager(device: torch.device, name: str, steps: int) -> dict[str, Any]:
    """The same sampled steps with all graphs and with none: tokens and decisions are equal.

    Decodes of 1 to 17 rows, and extends of every captured width. There is room for rows that 8
    divides: of other numbers kernels are compiled once more, for fields that lie otherwise. The
    scores in the graph are held against torch's on the host, of the same logits.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    decoder = decoder_of(name, device, dtype, dummy=name != "tiny")
    runners = [runner_of(decoder, _MOST_ROWS, pieces) for pieces in (PIECES, frozenset[str]())]
    compared, wrong, worst = 0, [], 0.0
    for count in (1, 2, 3, 8, 17):
        graphs, eager = (_sampled(runner, count, steps) for runner in runners)
        for number, (one, other) in enumerate(zip(graphs, eager, strict=True)):
            compared += count
            worst = float(np.maximum(worst, one.score_error))  # NaN stays
            pairs = zip(one.decided, other.decided, strict=True)
            unequal = [(row, *pair) for row, pair in enumerate(pairs) if pair[0] != pair[1]]
            wrong += [{"rows": count, "step": number, "row_graph_eager": each} for each in unequal]
    for runner in runners:
        runner.close()
    return {
        "compared": compared,
        "different": len(wrong),
        "first_different": wrong[:_SHOWN],
        "largest_score_difference": worst,
        "model": name,
        "dtype": str(dtype),
    }


class _Step(NamedTuple):
    """Token and destination of each row, and how far scores are from torch's of the same logits."""

    decided: list[tuple[int, int]]
    score_error: float


def _sampled(runner: CudaRunner, count: int, steps: int) -> list[_Step]:
    """``steps`` steps, each now and then an extend of 2 to 8 tokens."""
    rows = Rows(count, 400, 7, [10 + row for row in range(count)])
    ask = StepAsk(_sampling(count), np.full(count, 0.5, np.float32))
    vocabulary = runner.embedding.shape[0]
    found: list[_Step] = []
    for number in range(steps):
        for _ in range((0, 0, 1, 0, 3, 0, 7)[number % 7]):
            rows.append([11 + row for row in range(count)])
        output = decide_step(runner, rows, ask)
        assert output.tokens is not None
        if output.destinations is None or output.scores is None:
            raise AssertionError("the router was not asked within the step")
        exact = normalized_entropy(output.logits[:count].float().cpu(), vocabulary).numpy()
        apart = float(np.abs(output.scores[:count] - exact).max())
        tokens = output.tokens[:count].tolist()
        found.append(_Step(list(zip(tokens, output.destinations, strict=True)), apart))
    return found


def _sampling(count: int) -> RowSampling:
    ones = np.ones(count)
    return RowSampling(
        temperatures=0.9 * ones,
        top_k=np.zeros(count, np.int64),
        top_p=ones,
        min_p=0 * ones,
        seeds=np.arange(1, count + 1, dtype=np.uint64),
        positions=np.zeros(count, np.int64),
    )


def step_times(device: torch.device, name: str, quick: bool) -> dict[str, Any]:
    """Milliseconds of a decode step at 1, 8 and 32 rows, with graphs and without."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    decoder = decoder_of(name, device, dtype, dummy=name != "tiny")
    row: dict[str, Any] = {"model": name, "kind": "decode"}
    for label, pieces in ("graphs", PIECES), ("eager", frozenset[str]()):
        runner = runner_of(decoder, 32, pieces)
        for count in (1, 8, 32):
            row[f"{label}_{count}_ms"] = step_ms(runner, count, 500, 1, 10 if quick else 30)
        runner.close()
    return row


def large_step(device: torch.device) -> dict[str, Any]:
    """The LLM's extend at batch 1 beside the time in which its weights can be copied."""
    name = large_name(device)
    decoder = decoder_of(name, device, torch.bfloat16, dummy=True)
    runner = runner_of(decoder, 4)
    extend_ms = step_ms(runner, 1, 500, 4, 10)
    decode_ms = step_ms(runner, 1, 500, 1, 10)
    floor_ms = bytes_read(decoder.spec) / copy_bandwidth(device) * 1e3
    runner.close()
    return {
        "model": name,
        "kind": "extend of 4, batch 1",
        "graphs_1_ms": decode_ms,
        "extend_ms": extend_ms,
        "weights_over_bandwidth_ms": floor_ms,
        "times_the_floor": extend_ms / floor_ms,
        "within_1.3": extend_ms <= MOST_OF_BANDWIDTH * floor_ms,
    }


def large_name(device: torch.device) -> str:
    """The LLM, as large as fits."""
    total = torch.cuda.get_device_properties(device).total_memory
    return "32b" if total > 100 * _GIB else "8b"


def bytes_read(spec: ModelSpec, width: int = 2) -> int:
    """Weights that a step reads: all, but of the embedding only its tokens' rows, if the head is
    another tensor."""
    embedding = 0 if spec.tie_word_embeddings else spec.vocab_size * spec.hidden_size
    return width * (spec.num_parameters - embedding)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second that are read while 2 GiB are copied within the device.

    A copy reads and writes; weights are only read, so both count.
    """
    source = torch.empty(2 * _GIB, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(5):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize(device)
        best = max(best, 2 * source.nbytes / (time.perf_counter() - began))
    return best
