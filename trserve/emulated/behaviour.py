"""How requests travel between models whose routing is drawn: P and C from a router's values.

Knows matrices and the names of algorithms; nothing of requests, draws or latencies. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from trserve.emulated.profile import check_commits
from trserve.errors import ConfigError
from trserve.router_lib.parameters import split_weights
from trserve.router_lib.registry import FROM_PROFILE
from trserve.sched.algorithms import Behaviour, behaviour
from trserve.sched.system import InvalidSystem, Matrix, make_system

_ROWS: Final = ":"
_WEIGHTED: Final = "me"
"""The algorithm that has weights."""
_STEP_MS: Final = 1.0
"""Latencies are not asked about here."""


def matrix_text(matrix: Sequence[Sequence[float]]) -> str:
    """``0.65/0.35:1/0``, as ``--router-config`` can carry it."""
    return _ROWS.join("/".join(repr(value).removesuffix(".0") for value in row) for row in matrix)


def behaviour_of(values: Mapping[str, float | str], models: int) -> Behaviour:
    """What the ``emulated`` router of so many models does by default.

    ``values``: its parameters. ``algorithm``, or ``routing`` with ``tokens``; with neither, two
    models need ``p``. ``p`` and ``q`` replace the rows of P.

    Raises:
        ConfigError: they do not fit together; the message names one.
    """
    p, q = float(values["p"]), float(values["q"])
    if models != 2 and (p, q) != (FROM_PROFILE, FROM_PROFILE):
        raise ConfigError(f"--router-config p, q: are for two models; there are {models}")
    _refuse_what_would_be_ignored(values)
    try:
        return _behaviour(values, models, p, q)
    except InvalidSystem as error:
        raise ConfigError(f"--router-config: {_KEYS[error.parameter]} {error.problem}") from None


def _refuse_what_would_be_ignored(values: Mapping[str, float | str]) -> None:
    algorithm = values["algorithm"]
    if values["weights"] and algorithm != _WEIGHTED:
        raise ConfigError(
            f"--router-config weights={values['weights']}: is for algorithm={_WEIGHTED}; leave it "
            f"out, or give algorithm={_WEIGHTED}"
        )
    for name in ("routing", "tokens"):
        if algorithm and values[name]:
            raise ConfigError(
                f"--router-config {name}={values[name]}: algorithm={algorithm} says how requests "
                "travel; leave one of the two out"
            )


def _behaviour(values: Mapping[str, float | str], models: int, p: float, q: float) -> Behaviour:
    found = _given(values, p, q)
    system = make_system(found.routing.tolist(), found.tokens.tolist(), [_STEP_MS] * models)
    check_commits(system.routing.tolist(), system.tokens.tolist())
    # Where nobody stays, a matrix may say that staying commits nothing; with another p or q
    # somebody does.
    np.fill_diagonal(system.tokens, 1.0)
    for model, value in enumerate((p, q)):
        if value != FROM_PROFILE:
            system.routing[model] = value
            system.routing[model, model] = 1 - value
    check_commits(system.routing.tolist(), system.tokens.tolist())
    return Behaviour(system.routing, system.tokens)


_KEYS: Final = {
    "P": "routing:",
    "C": "tokens:",
    "routing": "algorithm:",
    "latency_ms": "routing:",
    "delta_ms": "routing:",
}
"""The router's parameter for each that an ``InvalidSystem`` may name."""


def _given(values: Mapping[str, float | str], p: float, q: float) -> Behaviour:
    algorithm = str(values["algorithm"])
    if algorithm:
        return behaviour(algorithm, _probabilities(algorithm, values, p, q))
    routing, tokens = str(values["routing"]), str(values["tokens"])
    if routing:
        return Behaviour(_matrix("P", routing), _matrix("C", tokens))
    if p == FROM_PROFILE:
        raise ConfigError(
            "--router emulated needs --router-config algorithm=..., routing=... with tokens=..., "
            "or, for two models, p=...; or a profile that says how its models' requests travel"
        )
    return behaviour("r2r", [p])


def _probabilities(
    algorithm: str, values: Mapping[str, float | str], p: float, q: float
) -> Sequence[float]:
    wanted = {_WEIGHTED: (), "r-stitch": (("p", p), ("q", q))}.get(algorithm, (("p", p),))
    for name, value in wanted:
        if value == FROM_PROFILE:
            raise ConfigError(f"--router-config algorithm={algorithm}: needs {name}=... too")
    if algorithm != _WEIGHTED:
        return [value for _, value in wanted]
    return split_weights(str(values["weights"]))


def _matrix(name: str, text: str) -> Matrix:
    try:
        return np.array([[float(v) for v in row.split("/")] for row in text.split(_ROWS)])
    except ValueError:
        raise InvalidSystem(name, f"{text!r} is no matrix; write 0.65/0.35:1/0") from None
