"""``bench.throughput --reproduce``: is the running system what the scheduling model says of it?

Checks on emulated devices, R2R with steps of 6.0 and 27.9 ms (``a100-0.6b-32b``); predictions are
taken at the realised P, and with what a device charges for the suffixes of rare visits
(``suffix_cost``; ``alone`` is T(B) without, ``as stepped`` T(B) of the steps as the server measured
them under ``auto``: what a host does after each forward pass is in those). With N held constant:

1. p = 0.35: measured against T(B) for N = 1, 2, 4, 8, 16 at the best B, and for every B of the
   N = 4 row; the published hardware beside. At least 97 %; the predicted best of N = 4 within
   1.5 % of the best measured.
2. From 1 to 16 users: at least 11.8 times the throughput (the model allows 12.38).
3. ``auto`` against T(B*), p in {0.05, 0.1, 0.2, 0.35, 0.6}, N in {2, 4, 8, 16}, each until its
   standard error is under 1 %. At least 97 %.
4. Against standard serving with a small model's step of 1.6 ms and p = 0.05: twice its throughput
   at N = 4, 8, 16; and flat within 3 % from 512 to 4,096 output tokens, standard serving beside.

While serving:

5. ``auto`` follows jumps of p and of N (``throughput_jumps``).
6. The search beside sixteen requests, and their steps beside the search (``throughput_search``).

Cells are compared at one p: a measured value counts times T at the asked p over T at the realised
one. Knows no HTTP.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import uvloop

from bench.closed_loop import Until, Window
from bench.common import Row, print_table, track
from bench.endpoint import NotAvailableError
from bench.prediction import best, latencies, predicted, row_of, system_at, warmed
from bench.systems import STANDARD, Running, Setup, Vector, running
from bench.throughput_jumps import follows_jumps
from bench.throughput_pair import LONG, PROFILE, Part, Verdict, pair_at, setup_at
from bench.throughput_search import search_beside_serving
from bench.throughput_tables import PUBLISHED_CURVE
from bench.workloads import Workload
from trserve.emulated.profile import load_profile
from trserve.sched.markov import throughput

P: Final = 0.35
LEAST: Final = 0.97
NEAR_BEST: Final = 0.985
SCALING: Final = 11.8
AUTO_P: Final = (0.05, 0.1, 0.2, 0.35, 0.6)
AUTO_N: Final = (2, 4, 8, 16)
FAST_STEP_MS: Final = 1.6
FAST_P: Final = 0.05
FAST_N: Final = (4, 8, 16)
TWICE: Final = 2.0
LENGTHS: Final = (512, 1024, 2048, 4096)
FLAT: Final = 0.03
EXACTLY: Final = Until(tokens=5000, least_s=10.0, most_s=180.0, warm_up_s=2.0)
PRECISELY: Final = Until(
    tokens=2000, relative_error=0.01, least_s=15.0, most_s=120.0, warm_up_s=8.0
)
FLATLY: Final = Until(tokens=5000, relative_error=0.01, least_s=15.0, most_s=60.0, warm_up_s=3.0)
QUICK: Final = Until(tokens=300, least_s=4.0, most_s=10.0, warm_up_s=2.0)


def reproduce(parts: Sequence[str], *, quick: bool) -> tuple[list[Row], bool]:
    """The rows of the parts asked for, and whether all their checks are met; prints verdicts.

    Quick cells are too short to judge by; they are judged all the same.
    """
    rows: list[Row] = []
    verdicts: list[Verdict] = []
    for part, run in track(_PARTS.items(), "parts"):
        if not any(number in parts for number in part):
            continue
        try:
            found, judged = run(quick)
        except NotAvailableError as error:
            found, judged = [], [Verdict(f"parts {part}: {error}", None, "to run", False)]
        rows += found
        verdicts += judged
    print_table("checks", [vars(verdict) for verdict in verdicts])
    return rows, all(verdict.ok for verdict in verdicts)


def cell(
    name: str,
    setup: Setup,
    window: Window,
    vector: Vector | None = None,
    workload: Workload = LONG,
) -> Row:
    """A row with how much of its prediction was reached."""
    row = row_of(name, setup, workload, window, vector)
    expected = row["predicted_tokens_per_s"]
    row["ratio"] = row["tokens_per_s"] / expected if expected else None
    row["gate_timeout_share"] = timeout_share(window)
    return row


def _watch(up: Running, setup: Setup, workload: Workload, count: int, until: Until) -> Window:
    return uvloop.run(up.measure(count, workload, warmed(until, setup, workload, count)))


def timeout_share(window: Window) -> float | None:
    """Of the gate's openings in the window, those by its safety net; None where not counted."""
    openings = {k: v for k, v in window.extra.items() if "gate" in k and "reason=" in k}
    total = sum(openings.values())
    late = sum(value for key, value in openings.items() if 'reason="timeout"' in key)
    return late / total if total else None


# -- 1 and 2 ---------------------------------------------------------------------------------


def model_against_measurement(quick: bool) -> tuple[list[Row], list[Verdict]]:
    """Fixed thresholds at p = 0.35."""
    setup = setup_at(P)
    system = pair_at(P)
    stars = {count: best(system, count).vector for count in (1, 2, 4, 8, 16)}
    wanted = dict.fromkeys([*stars.items(), *((4, (1, b)) for b in (1, 2, 3, 4))])
    at_p = {(n, v): throughput(system, n, [v])[0] for n, v in wanted}
    rows: dict[tuple[int, Vector], Row] = {}
    for count, vector in wanted:
        with running("delayed-fixed", setup, vector) as up:
            window = _watch(up, setup, LONG, count, QUICK if quick else EXACTLY)
        row = cell("delayed-fixed", setup, window, vector)
        row["at_p_tokens_per_s"] = at_p[count, vector] * row["ratio"]
        published = PUBLISHED_CURVE.get((count, vector))
        row["published_ratio"] = published[1] / published[0] if published else None
        rows[count, vector] = row
    return list(rows.values()), _curve_verdicts(rows, stars)


def _curve_verdicts(rows: dict[tuple[int, Vector], Row], stars: dict[int, Vector]) -> list[Verdict]:
    verdicts = [
        Verdict(
            f"p={P:g} N={count} B={vector}: measured over T(B)",
            row["ratio"],
            f"at least {LEAST:g}",
            row["ratio"] >= LEAST,
        )
        for (count, vector), row in rows.items()
    ]
    four = {vector: row["at_p_tokens_per_s"] for (n, vector), row in rows.items() if n == 4}
    near = four[stars[4]] / max(four.values())
    verdicts.append(
        Verdict("N=4: predicted best over best", near, f"at least {NEAR_BEST}", near >= NEAR_BEST)
    )
    ends = [rows[n, stars[n]]["at_p_tokens_per_s"] for n in (16, 1)]
    factor = ends[0] / ends[1]
    verdicts.append(Verdict("N=16 over N=1", factor, f"at least {SCALING}", factor >= SCALING))
    return verdicts


# -- 3 ---------------------------------------------------------------------------------------


def auto_against_best(quick: bool) -> tuple[list[Row], list[Verdict]]:
    """Thresholds that the server chooses."""
    rows: list[Row] = []
    verdicts = []
    for p in AUTO_P[1:4:2] if quick else AUTO_P:
        setup = setup_at(p)
        with running("delayed-auto", setup) as up:
            for count in AUTO_N[1::2] if quick else AUTO_N:
                window = _watch(up, setup, LONG, count, QUICK if quick else PRECISELY)
                row = cell("delayed-auto", setup, window)
                rows.append(row)
                ok = row["ratio"] >= LEAST
                name = f"auto p={p:g} N={count}: measured over T(B*)"
                verdicts.append(Verdict(name, row["ratio"], f"at least {LEAST:g}", ok))
    return rows, verdicts


# -- 4 ---------------------------------------------------------------------------------------


@contextmanager
def fast_profile() -> Iterator[str]:
    """A file with the pair's profile, but a small model's step of FAST_STEP_MS."""
    profile = load_profile(PROFILE)
    models = [
        {
            "name": model.name,
            "step": {"ms": FAST_STEP_MS if model is profile.models[0] else model.step.ms},
            "prefill": {
                "tokens_per_s": model.prefill.tokens_per_s,
                "free_tokens": model.prefill.free_tokens,
            },
        }
        for model in profile.models
    ]
    with tempfile.TemporaryDirectory(prefix="trs-bench-") as folder:
        path = Path(folder) / "fast-slm.json"
        path.write_text(json.dumps({"format": 1, "name": "fast-slm", "models": models}))
        yield str(path)


def against_standard(quick: bool) -> tuple[list[Row], list[Verdict]]:
    """Twice standard serving's throughput, and flat where standard serving is not."""
    with fast_profile() as profile:
        setup = setup_at(FAST_P, profile)
        until = QUICK if quick else FLATLY
        rows = _side_by_side(setup, until, LONG, FAST_N)
        verdicts = []
        for count in FAST_N:
            ratio = _rate(rows, "eager", count) / _rate(rows, STANDARD, count)
            check = f"p={FAST_P:g}, SLM {FAST_STEP_MS:g} ms, N={count}: over std-serving"
            verdicts.append(Verdict(check, ratio, f"at least {TWICE:g}", ratio >= TWICE))
        flat, judged = _flatness(setup, until, LENGTHS[::3] if quick else LENGTHS)
    return rows + flat, verdicts + judged


def _side_by_side(
    setup: Setup, until: Until, workload: Workload, counts: Sequence[int]
) -> list[Row]:
    rows = []
    for system in (STANDARD, "eager"):
        with running(system, setup) as up:
            for count in counts:
                window = _watch(up, setup, workload, count, until)
                rows.append(cell(system, setup, window, workload=workload))
    return rows


def _rate(rows: Sequence[Row], system: str, count: int) -> float:
    (found,) = (
        row["tokens_per_s"]
        for row in rows
        if row["system"] == system and row["concurrency"] == count
    )
    return float(found)


def _flatness(
    setup: Setup, until: Until, lengths: Sequence[int]
) -> tuple[list[Row], list[Verdict]]:
    rows: list[Row] = []
    verdicts = []
    for system in (STANDARD, "eager"):
        mine: list[float] = []
        with running(system, setup) as up:
            for length in lengths:
                workload = Workload(f"32/{length}", 32, length)
                window = _watch(up, setup, workload, FAST_N[0], until)
                rows.append(cell(system, setup, window, workload=workload))
                mine.append(_at_asked_p(setup, window))
        change = mine[-1] / mine[0] - 1
        wanted = f"within {FLAT:g}" if system == "eager" else "(shown beside)"
        ok = system != "eager" or abs(change) <= FLAT
        check = f"{system}: change from {lengths[0]} to {lengths[-1]} output tokens"
        verdicts.append(Verdict(check, change, wanted, ok))
    return rows, verdicts


def _at_asked_p(setup: Setup, window: Window) -> float:
    """The window's tokens/s, as they would be at the asked p by the model's eager prediction."""
    now = predicted("eager", setup, window)
    curves = latencies(setup, setup.algorithm.values)
    assert now is not None and curves is not None
    system = system_at("r2r", setup.algorithm.values, curves)
    asked = throughput(system, window.concurrency, [(1, 1)])[0]
    return window.tokens_per_s * asked / now


_PARTS: Final[dict[str, Part]] = {
    "12": model_against_measurement,
    "3": auto_against_best,
    "4": against_standard,
    "5": follows_jumps,
    "6": search_beside_serving,
}
"""By the numbers of the checks that they make."""
