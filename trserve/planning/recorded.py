"""Trace files of ``trserve plan``: read, checked, and held against the model.

A file has one JSON object a line, one request each, in the order in which they came::

    {"visits": [[0, 7], [1, 1], [0, 3]], "arrival_ms": 12.5}

``visits``: the models that wrote, by index, with how many steps in a row each ran. The last visit
ends the request. A third number is the tokens that the visit committed; without it the algorithm's
C gives them (the last step of a visit commits C[i][j], the others C[i][i]). ``arrival_ms``: when
the request came, in all lines or in none. Knows nothing of flags other than ``--trace``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import orjson

from trserve.errors import ConfigError
from trserve.sched.diagnose import fitted
from trserve.sched.journeys import TraceSource, Visit
from trserve.sched.search import Solution
from trserve.sched.simulator import Outcome, simulate
from trserve.sched.system import Matrix, System
from trserve.sched.table import ThresholdTable
from trserve.sched.vectors import Vector, is_feasible

_SLOW_STEPS: Final = 3000
"""A replay lasts so many steps of the slowest model: its interval is then about 1 %."""

_RIVALS: Final = 6
"""Vectors that are replayed beside the predicted best one and eager."""

_SEED: Final = 1


@dataclass(frozen=True)
class Trace:
    """Recorded requests; ``arrivals_ms`` rises from 0, or is None."""

    requests: list[list[Visit]]
    arrivals_ms: list[float] | None


@dataclass(frozen=True)
class Replays:
    """Replays of the trace at one concurrency, by vector; ``best`` is the fastest of them."""

    by_vector: dict[Vector, Outcome]
    best: Vector


def read_trace(path: Path, tokens: Matrix) -> Trace:
    """The requests of a file; ``tokens``: C, for visits that do not say theirs.

    Raises ConfigError, which names the line.
    """
    requests: list[list[Visit]] = []
    arrivals: list[Any] = []
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"--trace {path}: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            where = f"--trace {path}, line {number}"
            told = _object(line, where)
            requests.append(_visits(told["visits"], tokens, where))
            arrivals.append(_arrival(told, where))
    if not requests:
        raise ConfigError(f"--trace {path}: no request in it")
    return Trace(requests, _timeline(arrivals, f"--trace {path}"))


def follow(system: System, trace: Trace) -> System:
    """The system with the P and C that fit the trace best."""
    routing, tokens = fitted(trace.requests, system.models)
    return replace(system, routing=routing, tokens=tokens)


def _object(line: bytes, where: str) -> dict[str, Any]:
    try:
        told = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None
    if not isinstance(told, dict) or not isinstance(told.get("visits"), list):
        raise ConfigError(f'{where}: {{"visits": [[model, steps], ...]}} is expected')
    return told


def _visits(told: list[Any], tokens: Matrix, where: str) -> list[Visit]:
    if not told:
        raise ConfigError(f"{where}: visits is empty")
    following = [visit[0] if isinstance(visit, list) and visit else None for visit in told[1:]]
    return [
        _visit(visit, to, tokens, where) for visit, to in zip(told, [*following, None], strict=True)
    ]


def _visit(told: Any, to: Any, tokens: Matrix, where: str) -> Visit:
    if not isinstance(told, list) or len(told) not in (2, 3):
        raise ConfigError(f"{where}: a visit is [model, steps] or [model, steps, tokens]")
    model, steps = told[0], told[1]
    if type(model) is not int or not 0 <= model < len(tokens):
        raise ConfigError(f"{where}: model {model!r} is not one of the {len(tokens)}, from 0")
    if type(steps) is not int or steps < 1:
        raise ConfigError(f"{where}: a visit has at least one step, not {steps!r}")
    if len(told) == 3:
        if type(told[2]) not in (int, float) or told[2] < 0:
            raise ConfigError(f"{where}: tokens are a number of at least 0, not {told[2]!r}")
        return Visit(model, steps, float(told[2]))
    # A wrong ``to`` is reported with its own visit; the last step of a request stays.
    leaves_to = to if type(to) is int and 0 <= to < len(tokens) else model
    committed = (steps - 1) * tokens[model, model] + tokens[model, leaves_to]
    return Visit(model, steps, float(committed))


def _arrival(told: dict[str, Any], where: str) -> float | None:
    at = told.get("arrival_ms")
    if at is not None and (type(at) not in (int, float) or at < 0):
        raise ConfigError(f"{where}: arrival_ms is a number of at least 0, not {at!r}")
    return at


def _timeline(arrivals: Sequence[float | None], where: str) -> list[float] | None:
    known = [at for at in arrivals if at is not None]
    if not known:
        return None
    if len(known) < len(arrivals):
        raise ConfigError(f"{where}: arrival_ms is in some lines only; give it in all or in none")
    if any(later < earlier for earlier, later in pairwise(known)):
        raise ConfigError(f"{where}: arrival_ms falls; lines are in the order of arrival")
    return [at - known[0] for at in known]


def replay(system: System, concurrency: int, trace: Trace, solution: Solution) -> Replays:
    """The trace in a closed loop of ``concurrency``, under the predicted vector and its rivals."""
    seconds = _SLOW_STEPS * system.slowest_ms / 1000
    found = {
        vector: simulate(
            system,
            concurrency,
            ThresholdTable.fixed(vector),
            TraceSource(trace.requests, _SEED),
            seconds=seconds,
        )
        for vector in _rivals(solution)
    }
    best = max(found, key=lambda vector: found[vector].tokens_per_s)
    return Replays(found, best)


def _rivals(solution: Solution) -> list[Vector]:
    """The predicted best and eager, then what the model rates next, then neighbours."""
    chosen = solution.vector
    rated = sorted(solution.values, key=lambda vector: -solution.values[vector])
    steps = [
        tuple(b + step * (index == model) for index, b in enumerate(chosen))
        for model in range(len(chosen))
        for step in (-1, 1)
    ]
    near = [vector for vector in steps if is_feasible(vector, solution.concurrency)]
    others = dict.fromkeys((*rated[: _RIVALS // 2], *near))
    return list(dict.fromkeys((chosen, (1,) * len(chosen), *list(others)[:_RIVALS])))


def replay_arrivals(system: System, most: int, trace: Trace, table: ThresholdTable) -> Outcome:
    """The trace once, at its recorded arrival times, with at most ``most`` requests live."""
    assert trace.arrivals_ms is not None
    return simulate(
        system,
        most,
        table,
        _Once(trace.requests),
        seconds=max(trace.arrivals_ms[-1], system.slowest_ms) / 1000,
        arrivals_ms=trace.arrivals_ms,
    )


class _Once(TraceSource):
    """The requests in their order, from the first."""

    def __init__(self, requests: list[list[Visit]]) -> None:
        super().__init__(requests, _SEED)
        self._next = 0
