"""What a decoded token costs in ONNX Runtime, beside torch and the compiled kernels.

One row, one token a step, on the same threads: an SLM of the shape of SmolLM2-135M with random
weights, and the embedded pair. ``torch`` is this package's forward pass without the compiled
kernels (``TRSERVE_CPU_KERNELS=none``), ``kernels`` with them, both in float32 and in bfloat16, as
a server picks by itself; ``onnx`` is float32, ``onnx-int8`` has 8-bit weights. Each runs in a
process of its own. ``ms`` is the median over the steps, ``best_ms`` the least, which says more
where others use the machine; ``append_ms`` is the median for a suffix of 8 tokens, as a request
brings it that comes back from another model, ``prompt_ms`` for a prompt of 64.

``logit_difference`` and ``same_top`` are what the export found: the largest difference of a logit
from torch's in float32, and how often the most probable token is the same.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from bench.common import Row, parser, report, track
from trserve.edge.onnx.files import is_onnx_model
from trserve.edge.onnx.placement import check_packages
from trserve.errors import ModelUnavailableError
from trserve.models.aliases import LoadFormat, ResolvedModel, resolve_model
from trserve.models.loading import load_model
from trserve.models.spec import read_spec
from trserve.workers.kv_cache import KVCache
from trserve.workers.runner import Runner, TorchRunner
from trserve.workers.step import StepInputs

SMOLLM2: Final = "smollm2-135m-shape"
SHAPE: Final = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 2048,
    "rope_theta": 100_000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
MODELS: Final = (SMOLLM2, "tiny", "small")
ENGINES: Final = (
    *("onnx", "onnx-int8", "kernels", "kernels-bfloat16"),
    *("torch", "torch-bfloat16"),
)
CONTEXTS: Final = (64, 960)
STEPS: Final = 60
QUICK_STEPS: Final = 12
PROMPT: Final = 64
SUFFIX: Final = 8
_CAPACITY: Final = 1024
_BLOCK: Final = 16
_WITHOUT_KERNELS: Final = {"TRSERVE_CPU_KERNELS": "none"}


def find(name: str, folder: Path) -> tuple[ResolvedModel, LoadFormat]:
    """The model ``name``; of the shape alone a configuration is written to ``folder``."""
    if name != SMOLLM2:
        return resolve_model(name), "auto"
    path = folder / f"{SMOLLM2}.json"
    path.write_text(json.dumps(SHAPE))
    return ResolvedModel(name, path, read_spec(path), path, own_tokenizer=False), "dummy"


class Subject:
    """A runner and one row of it.

    Args:
        block_size: of the runner's KV blocks.
    """

    def __init__(self, runner: Runner, block_size: int) -> None:
        blocks = -(-_CAPACITY // block_size)
        self._runner = runner
        self._table = np.arange(blocks, dtype=np.int32)
        self._step = StepInputs(
            max_tokens=PROMPT, max_rows=1, max_blocks_per_row=blocks, block_size=block_size
        )

    def times_ms(self, tokens: int, start: int, steps: int) -> list[float]:
        """Of ``steps`` steps that compute ``tokens`` tokens each at the same place."""
        ids, found = np.arange(tokens) % 64, []
        for _ in range(steps):
            self._step.clear()
            self._step.add_row(ids, start, self._table)
            began = time.perf_counter()
            self._runner.forward(self._step)
            found.append((time.perf_counter() - began) * 1e3)
        return found


def onnx_subject(
    model: ResolvedModel, load_format: LoadFormat, threads: int, folder: Path, *, int8: bool
) -> tuple[Subject, Row]:
    """The model on ONNX Runtime, and how far its export is from torch."""
    from trserve.edge.onnx.export import export
    from trserve.edge.onnx.runner import OnnxRunner

    directory = folder / "export"
    directory.mkdir()
    difference = export(model, directory, int8=int8, load_format=load_format, threads=threads)
    assert is_onnx_model(directory)
    runner = OnnxRunner(
        directory,
        model.spec,
        rows=1,
        capacity=_CAPACITY,
        max_rows=1,
        threads=threads,
        tokenizer_size=model.spec.vocab_size,
    )
    exactness = {"logit_difference": difference.logits, "same_top": difference.agreement}
    return Subject(runner, _CAPACITY), exactness


def torch_subject(
    model: ResolvedModel, load_format: LoadFormat, dtype: torch.dtype
) -> Subject | None:
    """The model in this package's own forward pass; None where kernels are asked for, and miss."""
    decoder = load_model(model.path, model.spec, dtype=dtype, load_format=load_format)
    wanted = os.environ.get("TRSERVE_CPU_KERNELS") != "none"
    if decoder.native != wanted:
        return None
    kv = KVCache(model.spec, num_blocks=_CAPACITY // _BLOCK, block_size=_BLOCK, dtype=dtype)
    runner = TorchRunner(decoder, kv, tokenizer_size=model.spec.vocab_size)
    return Subject(runner, _BLOCK)


def measure(name: str, engine: str, threads: int, steps: int) -> list[Row]:
    """The rows of one model on one engine, in this process."""
    torch.set_num_threads(threads)
    exactness: Row = {}
    with tempfile.TemporaryDirectory() as made:
        model, load_format = find(name, Path(made))
        subject: Subject | None
        if engine.startswith("onnx"):
            int8 = engine.endswith("int8")
            subject, exactness = onnx_subject(model, load_format, threads, Path(made), int8=int8)
        else:
            dtype = torch.bfloat16 if engine.endswith("bfloat16") else torch.float32
            subject = torch_subject(model, load_format, dtype)
        if subject is None:
            return []
        subject.times_ms(PROMPT, 0, 2)
        prompt = statistics.median(subject.times_ms(PROMPT, 0, max(3, steps // 6)))
        return [
            {
                "model": name,
                "engine": engine,
                "threads": threads,
                **_row(subject, context, steps, prompt),
                **exactness,
            }
            for context in CONTEXTS
        ]


def _row(subject: Subject, context: int, steps: int, prompt_ms: float) -> Row:
    for start in range(0, context, PROMPT):
        subject.times_ms(min(PROMPT, context - start), start, 1)
    subject.times_ms(1, context, 3)
    decodes = subject.times_ms(1, context, steps)
    return {
        "context": context,
        "ms": statistics.median(decodes),
        "best_ms": min(decodes),
        "append_ms": statistics.median(subject.times_ms(SUFFIX, context, max(3, steps // 3))),
        "prompt_ms": prompt_ms,
    }


def run(name: str, engine: str, threads: int, steps: int) -> list[Row]:
    """:func:`measure` in a process of its own, with the threads and kernels that are meant."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    if engine.startswith("torch"):
        environment |= _WITHOUT_KERNELS
    command = [sys.executable, "-m", "bench.onnx_decode", "--measure", name, engine]
    command += ["--threads", str(threads), "--steps", str(steps)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name} on {engine} failed:\n{done.stderr[-2000:]}")
    found: list[Row] = json.loads(done.stdout.splitlines()[-1])
    return found


def _plot(axes: Any, rows: Sequence[Row]) -> None:
    shown = [row for row in rows if row["model"] == SMOLLM2]
    for context in CONTEXTS:
        some = [row for row in shown if row["context"] == context]
        axes.plot([row["engine"] for row in some], [row["ms"] for row in some], "o-", label=context)
    axes.set_ylabel("ms a token")
    axes.legend(title="context")


def arguments() -> argparse.Namespace:
    """The command line."""
    made = parser("onnx_decode", __doc__.partition("\n")[0])
    made.add_argument("--threads", type=int, default=1, help="of each engine")
    made.add_argument("--models", default=",".join(MODELS), help="some of them")
    made.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    made.add_argument("--measure", nargs=2, metavar=("MODEL", "ENGINE"), help=argparse.SUPPRESS)
    return made.parse_args()


def main() -> None:
    """Measure and report."""
    args = arguments()
    steps = args.steps or (QUICK_STEPS if args.quick else STEPS)
    if args.measure:
        name, engine = args.measure
        print(json.dumps(measure(name, engine, args.threads, steps)))
        return
    try:
        check_packages("bench.onnx_decode")
    except ModelUnavailableError as error:
        sys.exit(str(error))
    engines = ENGINES[:3] if args.quick else ENGINES
    pairs = [(name, engine) for name in args.models.split(",") for engine in engines]
    rows = [row for pair in track(pairs, "engines") for row in run(*pair, args.threads, steps)]
    report("onnx_decode", args, rows, "a decoded token, by engine", _plot)


if __name__ == "__main__":
    main()
