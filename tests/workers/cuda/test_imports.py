"""A machine without a GPU pays nothing for it; what a GPU needs is imported once it is used."""

from __future__ import annotations

import subprocess
import sys

_CODE = """
import sys

def loaded(*prefixes):
    return sorted(name for name in sys.modules if name.startswith(prefixes))

import trserve.workers.main, trserve.workers.loop, trserve.workers.step_cycle
import trserve.workers.runner, trserve.router_lib.r_stitch, trserve.router_lib.signals
ours = loaded("trserve.workers.cuda", "trserve.models.cuda")
assert not ours, ours
import trserve.workers.cuda.create, trserve.workers.cuda.host_time
theirs = loaded("triton", "flashinfer", "cupy", "cuda", "nvidia")
assert not theirs, theirs
"""


def test_a_cpu_server_imports_nothing_of_this_and_this_nothing_of_cudas():
    done = subprocess.run([sys.executable, "-c", _CODE], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
