"""How slow this machine is just now, for limits that were set where it was not. Knows no test."""

from __future__ import annotations

import time

USUAL_S = 0.055
"""A million additions in a loop, on the machines that the limits were set on."""


def slowness() -> float:
    """Times the usual that Python takes, at least 1; the best of three looks."""
    return max(1.0, min(_additions_s() for _ in range(3)) / USUAL_S)


def _additions_s() -> float:
    began, total = time.perf_counter(), 0
    while total < 1_000_000:
        total += 1
    return time.perf_counter() - began
