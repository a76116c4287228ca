"""Kernels compiled before anything is measured, in parallel: a device that has none takes a minute.

Each job is a process that makes ready what a later stage uses, with one layer of it; Triton and
flashinfer keep what they compiled in the user's cache, where the later stage finds it. Judges
nothing: what cannot be compiled says so in the stage that needs it.

Run one job: ``python -m bench.gpu_stages.kernels JOB cuda|cpu``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import numpy as np
import torch

from bench.gpu_stages.engine import golden_equality, large_name
from bench.gpu_stages.flashinfer import SHAPES, compare
from bench.gpu_stages.models import Rows, decide_tokens, decoder_of, runner_of
from tests.procfs import descendants
from trserve.errors import ModelUnavailableError
from trserve.workers.cuda.host_time import measure_host_time
from trserve.workers.cuda.runner import CudaRunner
from trserve.workers.in_step import StepAsk
from trserve.workers.row_sampling import greedy

_ROWS: Final = 8
_SPARE_S: Final = 12.0
"""Of a stage's time, for its imports before and its result after."""
_HALF: Final = torch.bfloat16
_PROMPT: Final = 100
"""Tokens; those of the users of later stages are as long."""


def kernels(device: str, quick: bool, limit_s: float = 90.0) -> dict[str, Any]:
    """Run all jobs beside each other; those that do not end in time are ended."""
    began = time.monotonic()
    names = ["tiny"] if device == "cpu" or quick else list(JOBS)
    running = {name: _start(name, device) for name in names}
    rows: list[dict[str, Any]] = []
    for name, process in running.items():
        left = max(0.1, limit_s - _SPARE_S - (time.monotonic() - began))
        try:
            said = "" if process.wait(left) == 0 else f"ended with {process.returncode}"
        except subprocess.TimeoutExpired:
            _end(process)
            said = "no end in time"
        rows.append({"job": name, "by_s": round(time.monotonic() - began, 1), "said": said})
    failed = [row["job"] for row in rows if row["said"]]
    summary = f"{len(rows) - len(failed)} of {len(rows)} jobs in {rows[-1]['by_s']} s"
    found: dict[str, Any] = {"tables": {"jobs": rows}, "summary": summary}
    if failed:
        found["unavailable"] = f"{summary}; not {', '.join(failed)}"
    return found


def _start(name: str, device: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "bench.gpu_stages.kernels", name, device]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a job and its compilers: they hold a lock on what the next one would compile."""
    for pid in (*descendants(process.pid), process.pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def _tiny(device: torch.device) -> None:
    _embedded("tiny", device)


def _embedded(name: str, device: torch.device) -> None:
    golden_equality(device, name, 2)
    if device.type == "cuda":
        golden_equality(device, name, 2, _HALF)


def _other_embedded(device: torch.device) -> None:
    _embedded("small", device)


def _one_layer(name: str, device: torch.device) -> None:
    """All kernels of a model are those of its first layer, its head and its sampling.

    Sizes of vocabularies that 16 divides are compiled for apart, and tokenizers have others.
    """
    decoder = decoder_of(name, device, _HALF, dummy=True, layers=1)
    vocabulary = decoder.spec.vocab_size
    for size in (vocabulary, vocabulary - 1):
        runner = runner_of(decoder, _ROWS, tokenizer_size=size)
        rows = Rows(_ROWS, 400, 1, [70, 3, 5, 12, 30, 2, 9, 17])
        rows.prefill(runner)
        decide_tokens(runner, rows, StepAsk(greedy(_ROWS), np.full(_ROWS, 0.5, np.float32)))
        _prompts(runner)
        runner.close()


def _prompts(runner: CudaRunner) -> None:
    """Of several rows at once: how keys are shared out depends on how many there are."""
    for count in (2, 3, 5):
        rows = Rows(count, 400, 1, [_PROMPT] * count)
        runner.forward(rows.next_step())


def _small(device: torch.device) -> None:
    _one_layer("0.6b", device)


def _large(device: torch.device) -> None:
    _one_layer(large_name(device), device)


def _host(device: torch.device) -> None:
    measure_host_time(_ROWS, 10, device=device)


def _other_heads(device: torch.device) -> None:
    """Sizes of heads that the models above do not have."""
    for name in ("triton", "flashinfer"):
        for shape in SHAPES:
            if shape.dim == 64:
                with suppress(ModelUnavailableError):  # flashinfer, which is optional
                    compare(name, shape, device, _HALF)


JOBS: Final[dict[str, Callable[[torch.device], None]]] = {
    "tiny": _tiny,
    "other_embedded": _other_embedded,
    "small": _small,
    "large": _large,
    "host": _host,
    "other_heads": _other_heads,
}


if __name__ == "__main__":
    JOBS[sys.argv[1]](
        torch.device(sys.argv[2], 0) if sys.argv[2] == "cuda" else torch.device("cpu")
    )
