"""Whole servers on a device: the ablation, MPS off and on, and 64 clients at once.

Real shapes with dummy weights on a GPU; the embedded pair, with graphs emulated, on a CPU, where
the figures mean nothing. Servers and users are those of the other benchmarks.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from bench.closed_loop import Until, Window
from bench.endpoint import Address, NotAvailableError, launched
from bench.systems import Algorithm, Endpoint, Setup, gate_arguments
from bench.workloads import Workload
from trserve.workers.cuda.buckets import PIECES_VARIABLE

PAPER: Final[Mapping[str, Mapping[int, float | None]]] = {
    "LLM only": {1: None, 4: None, 8: None},
    "no graphs": {1: 34.20, 4: 75.54, 8: 132.78},
    "+ SLM graph": {1: 51.22, 4: 95.55, 8: 164.08},
    "+ LLM extend graph": {1: 72.62, 4: 142.33, 8: 228.10},
    "+ router graph": {1: 73.02, 4: 143.88, 8: 230.79},
    "+ async": {1: 73.02, 4: 161.26, 8: 296.86},
    "+ delayed": {1: 73.02, 4: 210.61, 8: 372.48},
}
"""arXiv 2610.12242, its ablation: R2R with 0.6B and 32B on A100s, tokens/s by concurrency."""

_EMULATION: Final = {"TRSERVE_RUNNER": "graphs-on-cpu"}
_COUNTS: Final = (1, 4, 8, 16)
_SPARE_S: Final = 8.0
"""Of a stage's time, for its imports and its last server's end."""
_GIB: Final = 2**30


class Variant(NamedTuple):
    """One line of the ablation: which graphs, how steps start, which router."""

    name: str
    graphs: str
    system: str
    only: bool = False


VARIANTS: Final = (
    Variant("+ delayed", "slm,extend,router", "delayed-auto"),
    Variant("+ async", "slm,extend,router", "eager"),
    Variant("+ router graph", "slm,extend,router", "model-sync"),
    Variant("no graphs", "", "model-sync"),
    Variant("LLM only", "slm,extend,router", "eager", only=True),
    Variant("+ SLM graph", "slm", "model-sync"),
    Variant("+ LLM extend graph", "slm,extend", "model-sync"),
)
"""The ends first: where time runs out, those between are missing."""

ONE_BY_ONE: Final = VARIANTS[1]
"""All graphs, steps as they come."""


class Bed(NamedTuple):
    """What a stage measures on: models, flags, environment, and how long a window lasts."""

    models: tuple[str, ...]
    device: str
    more: tuple[str, ...]
    environment: Mapping[str, str]
    workload: Workload
    window_s: float


def bed_of(device: str, quick: bool) -> Bed:
    """Real shapes on a GPU, as large as fit; the embedded pair on a CPU."""
    if device == "cpu":
        workload = Workload("gpu_check", 20, 60)
        return Bed(("tiny", "small"), "cpu", (), _EMULATION, workload, 0.5)
    import torch

    memory = torch.cuda.get_device_properties(0).total_memory
    large = "32b" if memory > 100 * _GIB else "8b"
    more = ("--load-format", "dummy", "--max-model-len", "2048", "--mps", "auto")
    return Bed(
        ("0.6b", large), "cuda", more, {}, Workload("gpu_check", 100, 512), 1.0 if quick else 1.5
    )


@contextmanager
def server(bed: Bed, p: float, variant: Variant, *flags: str) -> Iterator[Address]:
    """A server of ``bed``, its router by chance with probability ``p``."""
    setup = Setup(bed.models, bed.device, Algorithm("r2r", (p,)), more=(*bed.more, *flags))
    arguments = setup.arguments(bed.models)
    arguments += setup.algorithm.router_arguments(bed.device)
    arguments += gate_arguments(variant.system, None, len(bed.models))
    with launched(
        arguments, {**os.environ, **bed.environment, PIECES_VARIABLE: variant.graphs}
    ) as found:
        yield found


def window(address: Address, bed: Bed, users: int, only: str | None = None) -> Window:
    """Tokens in one window of ``users``, by one model ``only`` or as routed."""
    until = Until(least_s=bed.window_s, most_s=4 * bed.window_s, warm_up_s=0.5)
    return asyncio.run(Endpoint(address, only).measure(users, bed.workload, until))


def ablation(device: str, quick: bool, limit_s: float = 110.0) -> dict[str, Any]:
    """Tokens/s by variant, share and concurrency; what there is no time for is left out."""
    bed, began = bed_of(device, quick), time.monotonic()
    shares = (0.35,) if quick or device == "cpu" else (0.35, 0.05)
    rows: list[dict[str, Any]] = []
    missing: list[str] = []
    longest = 0.0
    for p in shares:
        for variant in VARIANTS:
            started = time.monotonic()
            if started - began + 1.2 * longest > limit_s - _SPARE_S:
                missing.append(f"{variant.name} at p = {p:g}")
                continue
            rows.append(_ablation_row(bed, p, variant, (1, 4) if quick else _COUNTS))
            longest = max(longest, time.monotonic() - started)
    order = list(PAPER)
    rows.sort(key=lambda row: (-row["p"], order.index(row["variant"])))
    whole = f"{len(rows)} variants of {'/'.join(bed.models)}"
    return {
        "tables": {"tokens/s": rows},
        "missing": missing,
        "summary": ("EMULATED, no figure means anything: " if device == "cpu" else "")
        + whole
        + (f"; no time for {len(missing)}" if missing else ""),
    }


def _ablation_row(bed: Bed, p: float, variant: Variant, counts: tuple[int, ...]) -> dict[str, Any]:
    row: dict[str, Any] = {"p": p, "variant": variant.name}
    only = bed.models[-1] if variant.only else None
    try:
        with server(bed, p, variant) as address:
            for users in counts:
                row[f"N={users}"] = window(address, bed, users, only).tokens_per_s
    except NotAvailableError as error:
        row["error"] = str(error)
    if p == 0.35:
        row |= {f"paper N={n}": value for n, value in PAPER[variant.name].items()}
    return row


def mps(device: str, quick: bool) -> dict[str, Any]:
    """The same load without MPS and with a private daemon, both models on one GPU."""
    if device == "cpu":
        return {"unavailable": "there is no GPU that processes could share"}
    bed = bed_of(device, quick)
    rows: list[dict[str, Any]] = []
    for setting in ("off", "on"):
        try:
            with server(bed, 0.35, ONE_BY_ONE, "--mps", setting) as address:
                rows.append({"mps": setting, **_figures(window(address, bed, 4))})
        except NotAvailableError as error:
            rows.append({"mps": setting, "error": str(error)})
    if any("error" in row for row in rows):
        return {"unavailable": str(rows[-1].get("error")), "tables": {"mps": rows}}
    gain = rows[1]["tokens_per_s"] / rows[0]["tokens_per_s"]
    return {"tables": {"mps": rows}, "summary": f"with MPS {gain:.2f} times the tokens/s"}


def end_to_end(device: str, quick: bool, limit_s: float = 90.0) -> dict[str, Any]:
    """Many clients at once over every link that this machine has: handoffs, errors, times.

    The first is the one that must hold; of the others, what there is no time for is left out.
    """
    bed, began = bed_of(device, quick), time.monotonic()
    users = 8 if device == "cpu" else 64
    links = ("shm",) if device == "cpu" else ("shm", "host_mapped", "cuda_ipc")
    rows: list[dict[str, Any]] = []
    longest = 0.0
    for link in links:
        started = time.monotonic()
        if started - began + 1.2 * longest > limit_s - _SPARE_S:
            break
        rows.append(_link_row(bed, users, link))
        longest = max(longest, time.monotonic() - started)
    good = [row for row in rows if "error" not in row]
    found: dict[str, Any] = {"tables": {"links": rows}, "missing": list(links[len(rows) :])}
    found["summary"] = ("EMULATED graphs: " if device == "cpu" else "") + "; ".join(
        f"{row['link']} {row['handoffs_per_s']:.0f} handoffs/s" for row in good
    )
    if not good or rows[0] not in good:
        found["error"] = f"shm, which is always there: {rows[0].get('error')}"
    return found


def _link_row(bed: Bed, users: int, link: str) -> dict[str, Any]:
    try:
        with server(bed, 0.35, ONE_BY_ONE, "--link", link) as address:
            return {"link": link, **_figures(window(address, bed, users))}
    except NotAvailableError as error:
        return {"link": link, "error": str(error)}


def _figures(window: Window) -> dict[str, Any]:
    return {
        "concurrency": window.concurrency,
        "tokens_per_s": window.tokens_per_s,
        "handoffs_per_s": window.handoffs / window.seconds,
        "ttft_ms": window.ttft_ms,
        "share": window.share,
    }
