"""Models over several GPUs: tensor parallel 1 and 2, shared and separate GPUs.

Measured where two GPUs are. Elsewhere computed, and said so: the Markov model's throughput with the
steps of the emulated profile ``a100-0.6b-32b``, whose LLM is taken to be over two GPUs; on one,
a step reads twice the bytes. What sharing a GPU costs no model here knows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from bench.common import Row
from bench.endpoint import Address
from bench.gpu_stages.parts import tell
from bench.gpu_stages.served import ONE_BY_ONE, Bed, beds_of, serve, shown, window

PAPER: Final = {"tp 2 over tp 1": {1: 1.406, 4: 1.228}, "separate over shared": {4: 1.0643}}
"""arXiv 2610.12242, averages over its pairs."""

_P: Final = 0.35
_COUNTS: Final = (1, 4)
_MS_A_LAYER: Final = 0.1942
_MS_A_GB: Final = 0.4723
_LAYERS: Final = {"0.6b": 28, "32b": 64}
_GB: Final = {"0.6b": 1.19, "32b": 65.5}
"""The line through the two published steps, as the profile's sources say."""


def spread(device: str, quick: bool) -> dict[str, Any]:
    """See the module."""
    if device == "cuda":
        import torch

        if torch.cuda.device_count() >= 2:
            return _measured(quick)
    return _computed()


def _measured(quick: bool) -> dict[str, Any]:
    bed = beds_of("cuda", quick)[0]
    rows: list[Row] = []
    for name, flags in (
        ("shared, tp 1", ("--gpus", "0/0")),
        ("separate, tp 1", ("--gpus", "0/1")),
        ("tp 2", ("--gpus", "0/0,1", "--tp", "1,2")),
    ):
        rows.append(serve(bed, _P, ONE_BY_ONE, _by_count(bed), *flags, placement=name))
        tell({"rows": rows})
    found: dict[str, Any] = {"tables": {"placements": shown(rows)}, "rows": rows}
    errors = [str(row["error"]) for row in rows if "error" in row]
    if errors:
        return {**found, "error": errors[0]}
    gain = rows[2]["N=1"] / rows[0]["N=1"]
    return {**found, "summary": f"tp 2 {gain:.2f} times tp 1 at N = 1"}


def _by_count(bed: Bed) -> Callable[[Address, Row], None]:
    def use(address: Address, row: Row) -> None:
        for users in _COUNTS:
            row[f"N={users}"] = window(address, bed, users).tokens_per_s

    return use


def _computed() -> dict[str, Any]:
    from trserve.sched.algorithms import behaviour
    from trserve.sched.search import search
    from trserve.sched.system import make_system

    matrices = behaviour("r2r", [_P])
    rows: list[dict[str, Any]] = []
    for tp in (1, 2):
        steps: list[float | dict[int, float]] = [_step_ms("0.6b", 1), _step_ms("32b", tp)]
        system = make_system(matrices.routing.tolist(), matrices.tokens.tolist(), steps)
        found = {f"N={n}": search(system, n).tokens_per_s for n in _COUNTS}
        rows.append({"placement": f"EMULATED profile, tp {tp}", "llm_step_ms": steps[1], **found})
    gains = {n: rows[1][f"N={n}"] / rows[0][f"N={n}"] for n in _COUNTS}
    published = PAPER["tp 2 over tp 1"]
    said = ", ".join(f"N = {n}: {gain:.2f} (paper {published[n]})" for n, gain in gains.items())
    return {
        "tables": {"placements": rows},
        "summary": f"computed from an EMULATED profile, not measured: tp 2 over tp 1, {said}",
    }


def _step_ms(model: str, tp: int) -> float:
    return round(_LAYERS[model] * _MS_A_LAYER + _GB[model] / tp * _MS_A_GB, 1)
