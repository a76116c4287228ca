"""What the flags and files of ``trserve plan`` say, checked; every error names the flag.

Knows nothing of how a plan is made or shown.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import orjson

from trserve.errors import ConfigError
from trserve.sched.algorithms import behaviour
from trserve.sched.system import (
    DEFAULT_DELTA_MS,
    InvalidSystem,
    System,
    make_system,
)
from trserve.sched.vectors import Vector, is_feasible

MAX_CONCURRENCY = 4096
_SYSTEM_KEYS = ("P", "C", "D", "latency_ms", "delta_ms")


def numbers(flag: str, text: str) -> list[float]:
    """Comma-separated finite numbers."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{flag} {text}: numbers with commas between are expected") from None
    if not all(math.isfinite(value) for value in values):
        raise ConfigError(f"{flag} {text}: a number is not finite")
    return values


def integers(flag: str, text: str) -> list[int]:
    """Comma-separated integers of at least 1."""
    values = numbers(flag, text)
    if not all(value >= 1 and value == int(value) for value in values):
        raise ConfigError(f"{flag} {text}: integers of at least 1 are expected")
    return [int(value) for value in values]


def concurrencies(text: str) -> list[int]:
    found = integers("--concurrency", text)
    if max(found) > MAX_CONCURRENCY:
        raise ConfigError(f"--concurrency {text}: at most {MAX_CONCURRENCY}")
    return found


def fixed_vector(text: str, models: int, counts: list[int]) -> Vector:
    """``--batch-threshold``, feasible at every concurrency."""
    vector = tuple(integers("--batch-threshold", text))
    if len(vector) != models:
        raise ConfigError(f"--batch-threshold {text}: one for each of {models} models is expected")
    for count in counts:
        if not is_feasible(vector, count):
            raise ConfigError(
                f"--batch-threshold {text}: not feasible at concurrency {count}, where nobody "
                f"might ever start: the sum of B - 1 may be at most {count - 1}; lower it or "
                f"leave {count} out of --concurrency"
            )
    return vector


def latencies(text: str) -> list[float | dict[int, float]]:
    """``6.0,27.9``, or ``1:6.0/8:7.5`` for a curve."""
    return [
        _curve(part) if ":" in part else numbers("--latency", part)[0] for part in text.split(",")
    ]


def _curve(text: str) -> dict[int, float]:
    points: dict[int, float] = {}
    for point in text.split("/"):
        width, _, ms = point.partition(":")
        points[integers("--latency", width)[0]] = numbers("--latency", ms)[0]
    return points


def system_from_flags(
    latency: str | None, algorithm: str, routing: str | None, delta_ms: float | None
) -> System:
    """The system of ``--latency``, ``--algorithm`` and ``--routing``.

    Without ``--routing`` its P is neutral, and the caller must take P from a trace instead.
    """
    if latency is None:
        raise ConfigError("--latency is missing: one step time a model, or a --system file")
    curves = latencies(latency)
    # The tokens of an algorithm do not depend on its probabilities; any will do to get them.
    neutral = {"r-stitch": [0.5, 0.5], "me": [1.0] * len(curves)}.get(algorithm, [0.5])
    values = neutral if routing is None else numbers("--routing", routing)
    try:
        matrices = behaviour(algorithm, values)
        if len(matrices.routing) != len(curves):
            raise ConfigError(
                f"--latency {latency}: {algorithm} with this --routing has "
                f"{len(matrices.routing)} models, so as many step times are expected"
            )
        return make_system(
            matrices.routing.tolist(),
            matrices.tokens.tolist(),
            curves,
            delta_ms=DEFAULT_DELTA_MS if delta_ms is None else delta_ms,
        )
    except InvalidSystem as error:
        raise ConfigError(f"{_flag_of(error.parameter)}: {error.problem}") from None


def _flag_of(parameter: str) -> str:
    return {"latency_ms": "--latency", "delta_ms": "--delta-ms"}.get(parameter, "--routing")


def system_from_file(path: Path, delta_ms: float | None) -> System:
    """A ``--system`` file; ``delta_ms`` overrides what it says."""
    told = read_json(path, "--system")
    if not isinstance(told, dict):
        raise ConfigError(f"--system {path}: a JSON object is expected")
    if unknown := [key for key in told if key not in _SYSTEM_KEYS]:
        raise ConfigError(
            f"--system {path}: {unknown[0]} is not known; keys are {', '.join(_SYSTEM_KEYS)}"
        )
    for key in ("P", "C", "latency_ms"):
        if key not in told:
            raise ConfigError(f"--system {path}: {key} is missing")
    if not isinstance(told["latency_ms"], list):
        raise ConfigError(f"--system {path}: latency_ms: a list is expected, an entry a model")
    if delta_ms is None:
        delta_ms = told.get("delta_ms", DEFAULT_DELTA_MS)
    try:
        return make_system(
            told["P"], told["C"], told["latency_ms"], delay_ms=told.get("D"), delta_ms=delta_ms
        )
    except InvalidSystem as error:
        raise ConfigError(f"--system {path}: {error}") from None


def read_json(path: Path, flag: str) -> Any:
    """The file's content; ConfigError names ``flag``."""
    try:
        return orjson.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}") from None
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{flag} {path}: not JSON: {error}") from None
