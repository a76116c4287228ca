"""The runner through its Triton kernels, interpreted, says what the CPU's runner says."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

_CODE = """
import sys
from pathlib import Path
from tests.models.reference import make_model, save
from tests.workers.cuda import harness
from tests.workers.cuda.test_runner import FILTERS

harness.MAX_ROWS, harness.MAX_TOKENS, harness.ROW_TOKENS = 4, 32, 64
path = save(make_model("qwen3"), Path(sys.argv[1]))
router = harness.router_of("r-stitch", tau=0.5)
beside = harness.Beside(path, router, seed=0, attention="triton")
rows = [beside.row(length, **FILTERS[way]) for way, length in enumerate((5, 9, 3))]
seen = set()
for counts, more in (((5, 9, 3), 0), ((1, 1, 1), 1), ((2, 2, 2), 0), ((1, 1, 1), 0)):
    tokens, destinations = beside.check(rows, list(counts))
    seen |= set(destinations)
    for row, token in zip(rows, tokens.tolist()):
        row.tokens += [token, 7][: 1 + more]
assert seen == {0, 1}, seen
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_interpreted_kernels_decide_what_the_cpus_runner_decides(tmp_path):
    """In a process of its own: Triton reads once whether it is to interpret."""
    done = subprocess.run(
        [sys.executable, "-c", _CODE, str(tmp_path)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
