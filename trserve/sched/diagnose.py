"""What recorded requests say about the geometric model: the P and C closest to them, and the fit.

The Markov model assumes that every step at a model leaves it with the same probability, whatever
came before. That can fail in three ways, and each has its number here: visit lengths that are not
geometric, a probability that changes with the position in the request, and visits whose length
depends on the last one's (phases). Knows nothing of files, latencies or thresholds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trserve.sched.journeys import Visit
from trserve.sched.system import Matrix

Requests = Sequence[Sequence[Visit]]

QUARTERS: Final = 4
_KS_95: Final = 1.36
"""Kolmogorov-Smirnov, 95 %, times sqrt(n); conservative for integers."""


@dataclass(frozen=True)
class Fit:
    """How one model's visits look beside the geometric ones of the same mean.

    Attributes:
        visits: that ended by a move to another model.
        mean_steps: of a visit.
        cv2, geometric_cv2: squared coefficient of variation of the length, and what it would be.
        distance, noise: largest gap between the distribution functions, and the gap below which
            it is chance (95 %).
        leaving: the share of steps that leave, by quarter of the request; None without a step.
        correlation: of the lengths of successive visits of one request; None with too few.
    """

    model: int
    visits: int
    mean_steps: float
    cv2: float
    geometric_cv2: float
    distance: float
    noise: float
    leaving: tuple[float | None, ...]
    correlation: float | None
    correlation_noise: float

    def findings(self) -> list[str]:
        """What is wrong with the geometric model here, in words; empty if nothing is."""
        found = []
        if self.distance > self.noise:
            kind = "more uneven" if self.cv2 > self.geometric_cv2 else "more even"
            found.append(
                f"visit lengths are {kind} than geometric: squared variation {self.cv2:.2f} "
                f"instead of {self.geometric_cv2:.2f}"
            )
        known = [rate for rate in self.leaving if rate is not None]
        if known and max(known) - min(known) > _spread_noise(self):
            quarters = " / ".join("-" if rate is None else f"{rate:.3f}" for rate in self.leaving)
            found.append(f"leaving depends on the position: {quarters} by quarter of the request")
        if self.correlation is not None and abs(self.correlation) > self.correlation_noise:
            found.append(
                f"visits come in phases: successive lengths correlate by {self.correlation:+.2f}"
            )
        return found


def _spread_noise(fit: Fit) -> float:
    """Four standard errors of the difference of two quarters' rates, for visits so uneven."""
    rate = 1 / fit.mean_steps
    steps = max(1.0, fit.visits * fit.mean_steps / QUARTERS)
    return 4 * math.sqrt(2 * rate * max(fit.cv2, fit.geometric_cv2) / steps)


def fitted(requests: Requests, models: int) -> tuple[Matrix, Matrix]:
    """P and C [M, M] of the requests played one after the other.

    The last step of a request goes to where the next one enters. C's rows are constant: tokens a
    step, which is all that throughput depends on. A model without steps returns to model 0.
    """
    moves = np.zeros((models, models))
    steps, tokens = np.zeros(models), np.zeros(models)
    entries = [request[0].model for request in requests]
    for number, request in enumerate(requests):
        following = entries[(number + 1) % len(entries)]
        for visit, to in zip(request, [*(v.model for v in request[1:]), following], strict=True):
            moves[visit.model, visit.model] += visit.steps - 1
            moves[visit.model, to] += 1
            steps[visit.model] += visit.steps
            tokens[visit.model] += visit.tokens
    unseen = steps == 0
    moves[unseen, 0] = 1
    rate = tokens / np.maximum(steps, 1)
    return moves / moves.sum(axis=1, keepdims=True), np.repeat(rate[:, None], models, axis=1)


def fits(requests: Requests, models: int) -> list[Fit]:
    """One per model that requests moved away from."""
    found = []
    for model in range(models):
        lengths = [
            [visit.steps for visit in request[:-1] if visit.model == model] for request in requests
        ]
        whole = np.array([steps for some in lengths for steps in some], np.float64)
        if len(whole) >= 2:
            found.append(_fit(model, whole, lengths, _leaving(requests, model)))
    return found


def _fit(
    model: int,
    lengths: NDArray[np.float64],
    by_request: list[list[int]],
    leaving: tuple[float | None, ...],
) -> Fit:
    mean = float(lengths.mean())
    pairs = [pair for some in by_request for pair in pairwise(some)]
    return Fit(
        model,
        len(lengths),
        mean,
        float(lengths.var() / mean**2),
        1 - 1 / mean,
        _distance(lengths, mean),
        _KS_95 / math.sqrt(len(lengths)),
        leaving,
        _correlation(pairs),
        4 / math.sqrt(max(1, len(pairs))),
    )


def _distance(lengths: NDArray[np.float64], mean: float) -> float:
    steps = np.arange(1, int(lengths.max()) + 1)
    seen = np.searchsorted(np.sort(lengths), steps, side="right") / len(lengths)
    geometric = 1 - (1 - 1 / mean) ** steps
    return float(np.abs(seen - geometric).max())


def _leaving(requests: Requests, model: int) -> tuple[float | None, ...]:
    steps, left = np.zeros(QUARTERS), np.zeros(QUARTERS)
    for request in requests:
        total = sum(visit.steps for visit in request)
        # The first step of each quarter, and the end.
        edges = np.array([-(-quarter * total // QUARTERS) for quarter in range(QUARTERS + 1)])
        done = 0
        for number, visit in enumerate(request):
            last = done + visit.steps - 1
            if visit.model == model:
                inside = np.clip(edges, done, last + 1)
                steps += np.diff(inside)
                if number < len(request) - 1:
                    left[last * QUARTERS // total] += 1
            done = last + 1
    return tuple(
        float(gone / there) if there > 0 else None for gone, there in zip(left, steps, strict=True)
    )


def _correlation(pairs: list[tuple[int, int]]) -> float | None:
    if len(pairs) < 30:
        return None
    one, other = np.array(pairs, np.float64).T
    if one.std() == 0 or other.std() == 0:
        return None
    return float(np.corrcoef(one, other)[0, 1])
