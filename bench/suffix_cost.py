"""What the suffixes of handoffs add to an emulated model's steps, in the mean.

A request comes to a model with what others wrote since its last visit, and all of that is computed
in the step that it comes for. An emulated device charges for tokens beyond one a row like a real
one, so its step is longer than the profile's where visits are rare, and a prediction that knows
only the profile's step promises what the device cannot do: at p = 0.05 a step of six requests has
114 further tokens on average.

Knows distributions; no servers and no thresholds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from scipy import stats

from trserve.emulated.profile import EmulatedModel
from trserve.sched.system import Latency, interpolate

WIDEST: Final = 64
"""Requests in a step up to which curves are made, if the profile's go no further; then flat."""


def further_tokens_beyond(free: int, rows: int, share: float) -> float:
    """The mean of max(0, X - ``free``), X being the further tokens of ``rows`` requests.

    ``share`` of all tokens are the model's, each drawn by itself: between two of them lie
    geometrically many of others, and for ``rows`` requests their sum is negative binomial.
    """
    fewer = np.arange(free)
    mean = rows * (1.0 - share) / share
    missing = ((free - fewer) * stats.nbinom.pmf(fewer, rows, share)).sum()
    return max(0.0, float(mean - free + missing))


def shares(algorithm: str, values: Sequence[float]) -> tuple[float, ...] | None:
    """What share of the tokens each model writes, where every token is drawn by itself; else None.

    With r-stitch the large model writes several tokens in a row, of which only the first comes
    with a suffix.
    """
    if algorithm == "r-stitch" or not values:
        return None
    if algorithm == "me":
        total = sum(values)
        return tuple(value / total for value in values)
    return 1.0 - values[0], values[0]


def with_suffixes(model: EmulatedModel, share: float) -> Latency:
    """Milliseconds of a step of ``model`` by its requests, each of which brings its suffix."""
    alone, prefill = model.step.curve, model.prefill
    if not 0.0 < share < 1.0:
        return alone
    widest = max(WIDEST, *alone) if isinstance(alone, Mapping) else WIDEST
    return {
        rows: interpolate(alone, rows)
        + 1e3 * further_tokens_beyond(prefill.free_tokens, rows, share) / prefill.tokens_per_s
        for rows in range(1, widest + 1)
    }
