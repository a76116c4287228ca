"""Tokens/s as graphs and schedules are added one by one, beside those of the paper.

One server for each variant: the router's probability is changed while it serves. Knows what is
added; nothing of how servers are started.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from bench.common import Row
from bench.endpoint import Address, set_router
from bench.gpu_stages.parts import tell
from bench.gpu_stages.served import (
    ONE_BY_ONE,
    SPARE_S,
    Bed,
    Variant,
    beds_of,
    serve,
    shown,
    window,
)

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

DELAYED: Final = "delayed-auto"
VARIANTS: Final = (
    Variant("+ delayed", "slm,extend,router", DELAYED),
    ONE_BY_ONE,
    Variant("+ router graph", "slm,extend,router", "model-sync"),
    Variant("no graphs", "", "model-sync"),
    Variant("LLM only", "slm,extend,router", "eager", only=True),
    Variant("+ SLM graph", "slm", "model-sync"),
    Variant("+ LLM extend graph", "slm,extend", "model-sync"),
)
"""The ends first: where time runs out, those between are missing."""

_COUNTS: Final = (1, 4, 8, 16)
_SHARES: Final = (0.35, 0.05)
_PAPERS_PAIR: Final = ("0.6b", "32b")
_PAPERS_SHARE: Final = 0.35
_FIRST_S: Final = 0.25
_SOLVER_S: Final = 4.0
"""After a change thresholds follow what was measured since: half a second of it and more, at one
request so seldom that it takes longer (a row has the thresholds that it was measured with)."""


def ablation(device: str, quick: bool, limit_s: float = 110.0) -> dict[str, Any]:
    """Tokens/s by variant, share and concurrency; what there is no time for is left out."""
    began, longest = time.monotonic(), 0.0
    shares = _SHARES[:1] if quick or device == "cpu" else _SHARES
    beds = beds_of(device, quick)[: 1 if quick else None]
    rows: list[Row] = []
    missing: list[str] = []
    for bed in beds:
        for variant in VARIANTS:
            started = time.monotonic()
            if started - began + 1.2 * longest > limit_s - SPARE_S:
                missing.append(f"{variant.name} of {'/'.join(bed.models)}")
                continue
            rows += _variant_rows(bed, variant, shares, (1, 4) if quick else _COUNTS)
            tell({"rows": rows})
            longest = max(longest, time.monotonic() - started)
    order = list(PAPER)
    rows.sort(key=lambda row: (-row["p"], order.index(row["variant"])))
    whole = f"{len(rows)} rows of {', '.join('/'.join(bed.models) for bed in beds)}"
    return {
        "tables": dict(_tables(rows)),
        "rows": rows,
        "missing": missing,
        "summary": ("EMULATED, no figure means anything: " if device == "cpu" else "")
        + whole
        + (f"; no time for {len(missing)}" if missing else ""),
    }


def _tables(rows: list[Row]) -> Iterator[tuple[str, list[Row]]]:
    for models in dict.fromkeys(row["models"] for row in rows):
        yield f"tokens/s of {models}", shown([row for row in rows if row["models"] == models])


def _variant_rows(
    bed: Bed, variant: Variant, shares: tuple[float, ...], counts: tuple[int, ...]
) -> list[Row]:
    """A row for each share; whether one model writes alone depends on none."""
    names = "/".join(bed.models)
    wanted = shares[:1] if variant.only else shares
    rows: list[Row] = [{"models": names, "p": p, "variant": variant.name} for p in wanted]
    key = secrets.token_hex(16)
    whole = serve(
        bed,
        shares[0],
        variant,
        _measured(bed, variant, rows, counts, key),
        *(() if bed.device == "cpu" else ("--mps", "auto")),
        environment={"TRSERVE_ADMIN_KEY": key},
    )
    for row in rows:
        row |= whole
        if bed.models == _PAPERS_PAIR and row["p"] == _PAPERS_SHARE:
            row |= {f"paper N={n}": value for n, value in PAPER[variant.name].items()}
    return rows


def _measured(
    bed: Bed, variant: Variant, rows: list[Row], counts: tuple[int, ...], key: str
) -> Callable[[Address, Row], None]:
    """Fills ``rows``, in their order."""
    only = bed.models[-1] if variant.only else None

    def use(address: Address, _: Row) -> None:
        first = bed._replace(window_s=_FIRST_S)  # what is compiled at its first use, compiles
        window(address, first, max(counts), only)
        for row in rows:
            asyncio.run(set_router(address, key, {"p": row["p"]}))
            for users in counts:
                more = {"warm_up_s": _SOLVER_S} if variant.system == DELAYED else {}
                found = window(address, bed, users, only, **more)
                row[f"N={users}"] = found.tokens_per_s
                row[f"share N={users}"] = found.share
                if variant.system == DELAYED:
                    row[f"B N={users}"] = list(found.thresholds)

    return use
