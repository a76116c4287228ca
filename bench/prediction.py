"""What a throughput row is beside what was predicted: realised probabilities, T(B) at them.

Predictions need the models' step latencies: a profile's, or given ones. Knows no servers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Literal

from bench.closed_loop import Until, Window
from bench.common import Row
from bench.suffix_cost import shares, with_suffixes
from bench.systems import LLM_ONLY, SCHEDULED, SINGLE, Algorithm, Setup, Vector
from bench.workloads import Workload
from trserve.sched.algorithms import behaviour
from trserve.sched.markov import throughput
from trserve.sched.search import Solution, search
from trserve.sched.system import DEFAULT_DELTA_MS, Latency, System, interpolate, make_system
from trserve.sched.vectors import is_feasible

Steps = Literal["charged", "alone", "measured"]
SEARCH_BUDGET_S: Final = 20.0
READING_MARGIN: Final = 1.5
"""Reading shares the model with the steps of those that write already."""

FEWEST_QUANTA: Final = 10
"""Of the shortest step, in the scheduling model's time."""


def realised(algorithm: Algorithm, window: Window) -> tuple[float, ...] | None:
    """The probabilities (p; p and q; the weights) with which this window's requests travelled.

    From committed tokens and handoffs: a visit to the large model is two handoffs, and the token
    of the small one that began it was not committed. None where too little happened.
    """
    total = sum(window.tokens)
    if not total:
        return None
    if algorithm.name == "me":
        return tuple(tokens / total for tokens in window.tokens)
    small, large = window.tokens
    if algorithm.name != "r-stitch":
        return (large / total,)
    visits = window.handoffs / 2
    if not large or not small + visits:
        return None
    return visits / (small + visits), min(1.0, visits / large)


def latencies(setup: Setup, values: Sequence[float] | None = None) -> tuple[Latency, ...] | None:
    """Step latencies in milliseconds of the profile's models; None without a profile.

    With the probabilities ``values`` they have what the device charges for the suffixes that
    requests come with; without, they are the profile's alone.
    """
    if setup.profile is None:
        return None
    from trserve.emulated.profile import load_profile

    profile = load_profile(setup.profile)
    named = [profile.model(name) for name in setup.models]
    models = [each for each in named if each is not None]
    written = None if values is None else shares(setup.algorithm.name, values)
    if written is None:
        return tuple(each.step.curve for each in models)
    return tuple(map(with_suffixes, models, written))


def warmed(until: Until, setup: Setup, workload: Workload, concurrency: int) -> Until:
    """``until`` with a warm-up in which every model can read all prompts and written contexts.

    Where answers begin staggered the large model first has to read what it did not write; on
    emulated devices the profile says how fast it does.
    """
    if setup.profile is None:
        return until
    from trserve.emulated.profile import load_profile

    slowest = min(model.prefill.tokens_per_s for model in load_profile(setup.profile).models)
    tokens = concurrency * (workload.prompt_tokens + workload.output_tokens / 2)
    return replace(until, warm_up_s=until.warm_up_s + READING_MARGIN * tokens / slowest)


def measured_latencies(setup: Setup, window: Window) -> tuple[Latency, ...] | None:
    """What the server said of its steps at the window's end; None unless it did of every model."""
    known = len(window.step_ms) == len(setup.models) and min(window.step_ms) > 0
    return window.step_ms if known else None


def system_at(algorithm: str, values: Sequence[float], latency_ms: Sequence[Latency]) -> System:
    """The scheduling model's system at probabilities ``values``."""
    routing, tokens = behaviour(algorithm, values)
    shortest = min(interpolate(each, 1) for each in latency_ms)
    delta_ms = min(DEFAULT_DELTA_MS, shortest / FEWEST_QUANTA)
    return make_system(routing.tolist(), tokens.tolist(), list(latency_ms), delta_ms=delta_ms)


def best(system: System, concurrency: int) -> Solution:
    """The best thresholds."""
    return search(system, concurrency, budget_s=SEARCH_BUDGET_S)


def predicted(
    name: str,
    setup: Setup,
    window: Window,
    vector: Vector | None = None,
    *,
    steps: Steps = "charged",
) -> float | None:
    """Tokens/s of the system ``name`` at the realised probabilities; None where nothing is known.

    A server alone takes all N requests in every step. For auto it is the best T(B). Latencies are
    the profile's, ``charged`` with what it takes for suffixes or ``alone``; or those that the
    server ``measured`` meanwhile (at the width that it usually had), which have in them what the
    host does after each forward pass. Where there is no profile they are always the measured ones.
    """
    values = None if name in SINGLE else realised(setup.algorithm, window)
    curves = None
    if steps != "measured":
        curves = latencies(setup, values if steps == "charged" else None)
    curves = curves or measured_latencies(setup, window)
    if curves is None:
        return None
    n = window.concurrency
    if name in SINGLE:
        return 1000 * n / interpolate(curves[SINGLE[name]], n)
    if values is None:
        return None
    system = system_at(setup.algorithm.name, values, curves)
    if name == "delayed-auto":
        return best(system, n).tokens_per_s
    thresholds = (1,) * system.models if name == "eager" else vector
    if thresholds is None or not is_feasible(thresholds, n):
        return None
    return throughput(system, n, [thresholds])[0]


def thresholds_of(name: str, window: Window, vector: Vector | None) -> list[int] | None:
    """The batch thresholds in force; None where a system has none (a server says 0 then)."""
    found = vector or window.thresholds
    return list(found) if name in SCHEDULED and found and min(found) >= 1 else None


def row_of(
    name: str, setup: Setup, workload: Workload, window: Window, vector: Vector | None = None
) -> Row:
    """One row of the benchmark."""
    routed = name not in SINGLE
    values = realised(setup.algorithm, window) if routed else None
    return {
        "algorithm": setup.algorithm.shown if routed else None,
        "workload": workload.name,
        "system": name,
        "concurrency": window.concurrency,
        "batch_threshold": thresholds_of(name, window, vector),
        "tokens_per_s": window.tokens_per_s,
        "predicted_tokens_per_s": predicted(name, setup, window, vector),
        "steps_alone_tokens_per_s": predicted(name, setup, window, vector, steps="alone"),
        "steps_measured_tokens_per_s": predicted(name, setup, window, vector, steps="measured"),
        "per_user_tokens_per_s": window.per_user_tokens_per_s,
        "ttft_ms": window.ttft_ms,
        "latency_s": window.latency_s,
        "p": values[0] if values else None,
        "llm_share": window.share if routed else float(name == LLM_ONLY),
        "relative_error": window.relative_error,
        "tokens": sum(window.tokens),
        "seconds": window.seconds,
    }


def missing_row(name: str, setup: Setup, workload: Workload, reason: str) -> Row:
    """The row of a system that this server cannot be."""
    return {
        "algorithm": setup.algorithm.shown,
        "workload": workload.name,
        "system": name,
        "not_available": reason,
    }
