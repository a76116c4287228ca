"""What the checks of the scheduling model share: the emulated pair, and what a verdict is.

R2R with steps of 6.0 and 27.9 ms (``a100-0.6b-32b``). Measures nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from bench.common import Row
from bench.prediction import latencies, system_at
from bench.systems import Algorithm, Setup
from bench.workloads import Workload
from trserve.sched.system import System

PROFILE: Final = "a100-0.6b-32b"
MODELS: Final = ("0.6b", "32b")
LONG: Final = Workload("reproduce", 32, 1024)
"""An answer that is replaced costs one prompt, which these profiles read in the same step."""


@dataclass(frozen=True)
class Verdict:
    """One check: what was found, and whether it is enough."""

    check: str
    found: float | None
    wanted: str
    ok: bool


Part = Callable[[bool], tuple[list[Row], list[Verdict]]]
"""Some of the checks, quick or not: its rows and verdicts."""


def setup_at(p: float, profile: str = PROFILE, more: tuple[str, ...] = ()) -> Setup:
    """R2R on the emulated pair; ``more`` are further flags of the server."""
    return Setup(MODELS, "emulated", Algorithm("r2r", (p,)), profile, more=more)


def pair_at(p: float) -> System:
    """What the scheduling model says of it."""
    curves = latencies(setup_at(p), (p,))
    assert curves is not None
    return system_at("r2r", (p,), curves)
