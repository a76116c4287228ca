"""What the scheduling models are told of a server: routing, tokens, step latencies, link delays.

Knows nothing of thresholds, of how many requests there are, or of how the numbers were found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]
Quanta = NDArray[np.int64]
Latency = float | Mapping[int, float]
"""Milliseconds of a step: one number, or a curve over the batch width."""

DEFAULT_DELTA_MS: Final = 0.1
MAX_QUANTA: Final = 1_000_000
_ROW_TOLERANCE: Final = 1e-6
_COARSE_QUANTA: Final = range(8, 17)
_ROUNDING: Final = 0.01


class InvalidSystem(ValueError):
    """A system that makes no sense; ``parameter`` is the key that is wrong (P, latency_ms, ...)."""

    def __init__(self, parameter: str, problem: str) -> None:
        super().__init__(f"{parameter}: {problem}")
        self.parameter = parameter
        self.problem = problem


@dataclass(frozen=True)
class System:
    """M models and how requests move between them. Make it with ``make_system``, which checks.

    Attributes:
        routing: P [M, M], the probability that a step at i sends its request to j.
        tokens: C [M, M], the tokens that such a step commits.
        latency_ms: for each model a number, or {width: milliseconds} with rising widths.
        delay_ms: D [M, M], how long a request travels from i to j.
        delta_ms: the quantum of time.
    """

    routing: Matrix
    tokens: Matrix
    latency_ms: tuple[Latency, ...]
    delay_ms: Matrix
    delta_ms: float = DEFAULT_DELTA_MS

    @property
    def models(self) -> int:
        return len(self.latency_ms)

    @property
    def tokens_per_step(self) -> Matrix:
        """[M]: the mean number of tokens that one request's step at i commits."""
        rewards: Matrix = (self.routing * self.tokens).sum(axis=1)
        return rewards

    def latency(self, model: int, width: int) -> float:
        """Milliseconds of a step over ``width`` requests."""
        return interpolate(self.latency_ms[model], width)

    def latency_quanta(self, concurrency: int) -> Quanta:
        """[M, N + 1]: the quanta of a step by width; column 0 is unused and 0."""
        table = np.zeros((self.models, concurrency + 1), np.int64)
        for model in range(self.models):
            for width in range(1, concurrency + 1):
                quanta = to_quanta(self.latency(model, width), self.delta_ms)
                if not 1 <= quanta <= MAX_QUANTA:
                    raise InvalidSystem(
                        "delta_ms",
                        f"a step of model {model} over {width} requests takes "
                        f"{self.latency(model, width):g} ms, which is {quanta} quanta of "
                        f"{self.delta_ms:g} ms; choose a quantum that gives 1 to {MAX_QUANTA}",
                    )
                table[model, width] = quanta
        return table

    def delay_quanta(self) -> Quanta:
        """[M, M]: the quanta that a request travels."""
        return np.array(
            [[to_quanta(delay, self.delta_ms) for delay in row] for row in self.delay_ms.tolist()],
            np.int64,
        )

    @property
    def slowest_ms(self) -> float:
        """The longest step of any model at any width."""
        return max(
            curve if isinstance(curve, float) else max(curve.values()) for curve in self.latency_ms
        )


def to_quanta(ms: float, delta_ms: float) -> int:
    """``ms`` in quanta, half to even; what is a half only but for the last bits counts as one."""
    return round(round(ms / delta_ms, 9))


def interpolate(curve: Latency, width: int) -> float:
    """Linear between the points of a curve, constant outside them."""
    if isinstance(curve, int | float):
        return float(curve)
    return float(np.interp(width, list(curve), list(curve.values())))


def coarsened(system: System) -> System:
    """The system with a quantum of 1/8 to 1/16 of its shortest step, or itself if it has that.

    Of these quanta, the largest that rounds no latency by over 1 %, else the one closest to that.
    """
    values = [
        ms
        for curve in system.latency_ms
        for ms in ([curve] if isinstance(curve, float) else curve.values())
    ]
    shortest = min(values)
    coarser = [parts for parts in _COARSE_QUANTA if shortest / parts > system.delta_ms * 1.5]
    if not coarser:
        return system

    def worst_rounding(parts: int) -> float:
        delta = shortest / parts
        return max(abs(to_quanta(ms, delta) * delta / ms - 1) for ms in values)

    close = [parts for parts in coarser if worst_rounding(parts) <= _ROUNDING]
    return replace(system, delta_ms=shortest / min(close[:1] or coarser, key=worst_rounding))


def make_system(
    routing: Sequence[Sequence[float]],
    tokens: Sequence[Sequence[float]],
    latency_ms: Sequence[float | Mapping[Any, float]],
    *,
    delay_ms: Sequence[Sequence[float]] | None = None,
    delta_ms: float = DEFAULT_DELTA_MS,
) -> System:
    """A checked system; the keys of a latency curve may be text, as JSON has them.

    Raises InvalidSystem, whose ``parameter`` is P, C, D, latency_ms or delta_ms.
    """
    models = len(latency_ms)
    if models < 2:
        raise InvalidSystem("latency_ms", f"needs two models or more, not {models}")
    if not (isinstance(delta_ms, int | float) and np.isfinite(delta_ms) and delta_ms > 0):
        raise InvalidSystem("delta_ms", f"must be a positive number, not {delta_ms!r}")
    curves = tuple(_curve(curve, model) for model, curve in enumerate(latency_ms))
    matrix = _matrix("P", routing, models)
    for model, total in enumerate(matrix.sum(axis=1)):
        if abs(total - 1) > _ROW_TOLERANCE:
            raise InvalidSystem("P", f"row {model} sums to {total:g}, not to 1")
    delays = np.zeros((models, models)) if delay_ms is None else _matrix("D", delay_ms, models)
    return System(
        matrix / matrix.sum(axis=1, keepdims=True),
        _matrix("C", tokens, models),
        curves,
        delays,
        float(delta_ms),
    )


def _matrix(name: str, values: Sequence[Sequence[float]], models: int) -> Matrix:
    try:
        matrix = np.array(values, np.float64)
    except (TypeError, ValueError):
        raise InvalidSystem(name, "must be a matrix of numbers") from None
    if matrix.shape != (models, models):
        shape = " x ".join(map(str, matrix.shape))
        raise InvalidSystem(
            name, f"must be {models} x {models}, as there are latencies; is {shape}"
        )
    if not (np.isfinite(matrix).all() and (matrix >= 0).all()):
        raise InvalidSystem(name, "holds a negative number, or one that is not finite")
    return matrix


def _curve(curve: float | Mapping[Any, float], model: int) -> Latency:
    if not isinstance(curve, Mapping):
        return _milliseconds(curve, model)
    try:
        points = {int(width): _milliseconds(ms, model) for width, ms in curve.items()}
    except (TypeError, ValueError) as error:
        if isinstance(error, InvalidSystem):
            raise
        raise InvalidSystem("latency_ms", f"model {model}: batch widths are integers") from None
    if not points or min(points) < 1:
        raise InvalidSystem("latency_ms", f"model {model}: a curve needs batch widths from 1 up")
    return dict(sorted(points.items()))


def _milliseconds(value: Any, model: int) -> float:
    # A bool is an int to Python, and never a latency.
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidSystem("latency_ms", f"model {model}: {value!r} is not a number")
    if not (np.isfinite(value) and value > 0):
        raise InvalidSystem("latency_ms", f"model {model}: must be positive, not {value:g}")
    return float(value)
