"""How the routing algorithms look to the scheduling model: P and C from a few probabilities.

Knows nothing of routers' thresholds, latencies or traces. Two models: 0 is the small one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np

from trserve.sched.system import InvalidSystem, Matrix


class Behaviour(NamedTuple):
    """P and C [M, M] of an algorithm."""

    routing: Matrix
    tokens: Matrix


def _one_token_visits(values: Sequence[float]) -> Behaviour:
    (p,) = _probabilities(values, "p, the probability that a small model's token is routed")
    # The routed token of the small model is replaced, so it commits nothing.
    return Behaviour(np.array([[1 - p, p], [1, 0]]), np.array([[1.0, 0.0], [1.0, 0.0]]))


def _stitch(values: Sequence[float]) -> Behaviour:
    p, q = _probabilities(
        values, "p,q: that a small model's token is routed, that a large one's sends it back"
    )
    # The large model's token is always kept.
    return Behaviour(np.array([[1 - p, p], [q, 1 - q]]), np.array([[1.0, 0.0], [1.0, 1.0]]))


def _mixture(values: Sequence[float]) -> Behaviour:
    weights = np.array(values, np.float64)
    if len(values) < 2 or not (weights >= 0).all() or not 0 < weights.sum() < np.inf:
        raise InvalidSystem("routing", "me takes one weight for each of two models or more")
    shares = weights / weights.sum()
    return Behaviour(np.tile(shares, (len(values), 1)), np.ones((len(values), len(values))))


def _probabilities(values: Sequence[float], what: str) -> Sequence[float]:
    wanted = 2 if what.startswith("p,q") else 1
    if len(values) != wanted:
        raise InvalidSystem("routing", f"takes {what}; {len(values)} numbers given")
    for value in values:
        if not 0 <= value <= 1:
            raise InvalidSystem("routing", f"a probability is between 0 and 1, not {value:g}")
    return values


ALGORITHMS: Final[dict[str, Callable[[Sequence[float]], Behaviour]]] = {
    "r2r": _one_token_visits,
    "citer": _one_token_visits,
    "co-llm": _one_token_visits,
    "confidence": _one_token_visits,
    "r-stitch": _stitch,
    "me": _mixture,
}


def behaviour(algorithm: str, values: Sequence[float]) -> Behaviour:
    """P and C of ``algorithm``; InvalidSystem if its probabilities or weights do not fit."""
    return ALGORITHMS[algorithm](values)


def probability_of_share(algorithm: str, share: float, values: Sequence[float]) -> list[float]:
    """The algorithm's probabilities at which ``share`` of all tokens come from the large model.

    ``values``: for r-stitch its p,q, of which only q counts; for the others unused.
    """
    if algorithm == "me":
        raise InvalidSystem("algorithm", "me has weights, no threshold to choose")
    if algorithm != "r-stitch":
        return [share]
    if len(values) != 2 or not 0 < values[1] <= 1:
        raise InvalidSystem("routing", "r-stitch needs p,q here too, for its q (above 0)")
    if share >= 1:
        return [1.0, 0.0]
    # One small-model step commits 1 - p tokens there, and with p a visit of 1/q tokens.
    odds = share / (1 - share)
    return [odds / (1 / values[1] + odds), values[1]]
