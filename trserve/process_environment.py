"""What every process of a server reads for itself, some before they know the plan.

Knows settings and variables; not which process reads them.
"""

from __future__ import annotations

from typing import Final

from trserve.config import LaunchConfig
from trserve.ipc.child import LOG_LEVEL_VARIABLE

_CUDA_GRAPHS: Final = "TRSERVE_CUDA_GRAPHS"
"""Names what a worker captures (``workers/cuda/buckets.py``, which imports too much for here)."""


def process_environment(config: LaunchConfig) -> dict[str, str]:
    """Variables for all processes, beside those that they inherit."""
    found = {LOG_LEVEL_VARIABLE: config.endpoint.log_level}
    if config.placement.enforce_eager:
        found[_CUDA_GRAPHS] = ""
    return found
