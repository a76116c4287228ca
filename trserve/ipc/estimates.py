"""What the solver says of the system, in float64 words of the slab. One writer, the solver.

Knows where the words lie; nothing of how they are found. Words of one report may be of two
solutions for a reader that comes in between: they are for people and metrics, and nothing is
decided by them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trserve.ipc.layout import ESTIMATE_WORDS
from trserve.ipc.slab import Slab

_HEARTBEAT: Final = ESTIMATE_WORDS.index("heartbeat")


class Report(NamedTuple):
    """One look at the words; all 0 before the solver knows any.

    Attributes:
        live: N, averaged over about a second.
        predicted_tokens_per_s: the model's, for the thresholds in force.
        eager_tokens_per_s: the model's, for B = 1.
        measured_tokens_per_s: of the last seconds in which N stood still.
        solutions: how often the thresholds were worked out.
        changes: how often routing was found to have changed.
        heartbeat: signs of life so far: it stands still while a solver hangs.
        routing, tokens: P and C, [M, M].
        latency_ms: [M], of a step at the mean width.
    """

    live: float
    predicted_tokens_per_s: float
    eager_tokens_per_s: float
    measured_tokens_per_s: float
    solutions: float
    changes: float
    heartbeat: float
    routing: NDArray[np.float64]
    tokens: NDArray[np.float64]
    latency_ms: NDArray[np.float64]


def read_report(slab: Slab) -> Report:
    """What the words say now."""
    models, words = slab.layout.workers, slab.estimates.copy()
    named, rest = np.split(words, [len(ESTIMATE_WORDS)])
    routing, tokens, latency = np.split(rest, [models**2, 2 * models**2])
    shape = (models, models)
    live, predicted, eager, measured, solutions, changes, heartbeat = named.tolist()
    return Report(
        live=live,
        predicted_tokens_per_s=predicted,
        eager_tokens_per_s=eager,
        measured_tokens_per_s=measured,
        solutions=solutions,
        changes=changes,
        heartbeat=heartbeat,
        routing=routing.reshape(shape),
        tokens=tokens.reshape(shape),
        latency_ms=latency,
    )


def read_heartbeat(slab: Slab) -> int:
    """The solver's signs of life so far."""
    return int(slab.estimates[_HEARTBEAT])


def beat(slab: Slab) -> None:
    """One more."""
    slab.estimates[_HEARTBEAT] += 1


def write_numbers(slab: Slab, **numbers: float) -> None:
    """Store some of the named words."""
    for name, value in numbers.items():
        slab.estimates[ESTIMATE_WORDS.index(name)] = value


def write_matrices(
    slab: Slab,
    routing: NDArray[np.float64],
    tokens: NDArray[np.float64],
    latency_ms: Sequence[float],
) -> None:
    """Store P, C and L."""
    slab.estimates[len(ESTIMATE_WORDS) :] = np.concatenate(
        (routing.ravel(), tokens.ravel(), np.asarray(latency_ms, np.float64))
    )
