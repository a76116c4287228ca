"""What ``python -m bench.gpu_check`` has shown to work on a device. A table; asks nobody.

A stage is entered here together with the result that shows it, ``docs/results/gpu-check.json``.
Until then everything that rests on it says that it is unproven.
"""

from __future__ import annotations

from typing import Final

DRIVER: Final = "env"
MEMORY: Final = "engine"
LINKS: Final = "ipc"
MPS: Final = "mps"
"""Stages of the script, by what rests on them here."""

PROVEN: Final[frozenset[str]] = frozenset()
"""Names of stages that passed. None so far: nothing here has run on a GPU yet."""


def unproven(*stages: str) -> bool:
    """Whether something that rests on all of ``stages`` has still to be shown on a device."""
    return not PROVEN.issuperset(stages)
