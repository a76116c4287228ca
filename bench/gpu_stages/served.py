"""Whole servers on a device: 64 clients at once over each link, MPS off and on.

Real shapes with dummy weights on a GPU; the embedded pair, with graphs emulated, on a CPU, where
the figures mean nothing. Servers and users are those of the other benchmarks. A server that fails,
or a user of it, is a row that says so.
"""

from __future__ import annotations

import asyncio
import os
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from bench.closed_loop import Until, Window
from bench.common import Row
from bench.endpoint import Address, launched
from bench.gpu_stages.parts import tell, told
from bench.systems import Algorithm, Endpoint, Setup, gate_arguments
from bench.workloads import Workload
from trserve.workers.cuda.buckets import PIECES_VARIABLE

_EMULATION: Final = {"TRSERVE_RUNNER": "graphs-on-cpu"}
_GIB: Final = 2**30
_KV_GIB: Final = 24
"""Of both models together: twice what 64 users need. Not all that fits, so that an estimate of what
else a process takes, which no device has confirmed, ends no server."""

_READY_S: Final = 60.0
_WARM_UP_S: Final = 0.5
SPARE_S: Final = 8.0
"""Of a stage's time, for its last server's end."""
_SAID: Final = 10
"""Lines of what a server says on standard error: which link failed, what cannot be captured."""


class Variant(NamedTuple):
    """Which graphs a server has, how its steps start, and which model writes, if not all."""

    name: str
    graphs: str
    system: str
    only: bool = False


ONE_BY_ONE: Final = Variant("+ async", "slm,extend,router", "eager")
"""All graphs, steps as they come."""


class Bed(NamedTuple):
    """What a stage measures on: models, flags, environment, and how long a window lasts."""

    models: tuple[str, ...]
    device: str
    more: tuple[str, ...]
    environment: Mapping[str, str]
    workload: Workload
    window_s: float


def beds_of(device: str, quick: bool) -> list[Bed]:
    """Pairs with the real shapes that fit a GPU, the largest first; the embedded pair on a CPU."""
    if device == "cpu":
        workload = Workload("gpu_check", 20, 60)
        return [Bed(("tiny", "small"), "cpu", (), _EMULATION, workload, 0.5)]
    import torch

    gib = torch.cuda.get_device_properties(0).total_memory // _GIB
    memory = f"{min(_KV_GIB, gib // 4)}g"
    more = ("--load-format", "dummy", "--max-model-len", "2048", "--memory", memory)
    workload, window_s = Workload("gpu_check", 100, 512), 1.0 if quick else 1.5
    return [
        Bed(("0.6b", large), "cuda", more, {}, workload, window_s)
        for large in (("32b", "8b") if gib > 100 else ("8b",))
    ]


def serve(
    bed: Bed,
    p: float,
    variant: Variant,
    use: Callable[[Address, Row], None],
    *flags: str,
    environment: Mapping[str, str] | None = None,
    **row: Any,
) -> Row:
    """``row``, to which ``use`` adds what it finds at a server of ``bed``, or ``error``.

    The server's router decides by chance, with probability ``p``.
    """
    setup = Setup(bed.models, bed.device, Algorithm("r2r", (p,)), more=(*bed.more, *flags))
    arguments = setup.arguments(bed.models)
    arguments += setup.algorithm.router_arguments(bed.device)
    arguments += gate_arguments(variant.system, None, len(bed.models))
    variables = {**bed.environment, **(environment or {}), PIECES_VARIABLE: variant.graphs}
    said: list[str] = []
    began = time.monotonic()
    try:
        with launched(
            arguments, {**os.environ, **variables}, ready_timeout_s=_READY_S, said=said
        ) as address:
            row["start_s"] = round(time.monotonic() - began, 1)
            use(address, row)
    except Exception as error:
        # Whatever fails is this row's result, and the next server is another one.
        traceback.print_exc()
        row["error"] = told(error)
    if said:
        row["said"] = said[-_SAID:]
    return row


def window(
    address: Address,
    bed: Bed,
    users: int,
    only: str | None = None,
    warm_up_s: float = _WARM_UP_S,
) -> Window:
    """Tokens in one window of ``users``, by one model ``only`` or as routed."""
    until = Until(least_s=bed.window_s, most_s=4 * bed.window_s, warm_up_s=warm_up_s)
    return asyncio.run(Endpoint(address, only).measure(users, bed.workload, until))


def shown(rows: list[Row]) -> list[Row]:
    """``rows`` as a table has them: what servers said has lines, and stays in the JSON."""
    return [{key: value for key, value in row.items() if key != "said"} for row in rows]


def mps(device: str, quick: bool) -> dict[str, Any]:
    """The same load without MPS and with a private daemon, both models on one GPU."""
    if device == "cpu":
        return {"unavailable": "there is no GPU that processes could share"}
    bed = beds_of(device, quick)[0]
    rows: list[Row] = []
    for setting in ("off", "on"):
        flags = ("--mps", setting)
        rows.append(serve(bed, 0.35, ONE_BY_ONE, _by(bed, 4), *flags, mps=setting))
        tell({"rows": rows})
    found: dict[str, Any] = {"tables": {"mps": shown(rows)}, "rows": rows}
    errors = [str(row["error"]) for row in rows if "error" in row]
    if errors:
        return {**found, "unavailable": errors[-1]}
    gain = rows[1]["tokens_per_s"] / rows[0]["tokens_per_s"]
    return {**found, "summary": f"with MPS {gain:.2f} times the tokens/s"}


def end_to_end(device: str, quick: bool, limit_s: float = 90.0) -> dict[str, Any]:
    """Many clients at once over every link that this machine has: handoffs, errors, times.

    The first is the one that must hold; of the others, what there is no time for is left out. Only
    the last has MPS, which may be what fails: models that take turns are slower.
    """
    bed, began = beds_of(device, quick)[0], time.monotonic()
    users = 8 if device == "cpu" else 64
    links = ("shm",) if device == "cpu" else ("shm", "host_mapped", "cuda_ipc")
    rows: list[Row] = []
    longest = 0.0
    for link in links:
        started = time.monotonic()
        if started - began + 1.2 * longest > limit_s - SPARE_S:
            break
        rows.append(_link_row(bed, users, link))
        tell({"rows": rows})
        longest = max(longest, time.monotonic() - started)
    good = [row for row in rows if "error" not in row]
    found: dict[str, Any] = {"tables": {"links": shown(rows)}, "rows": rows}
    found["missing"] = list(links[len(rows) :])
    found["summary"] = ("EMULATED graphs: " if device == "cpu" else "") + "; ".join(
        f"{row['link']} {row['handoffs_per_s']:.0f} handoffs/s" for row in good
    )
    if not good or rows[0] not in good:
        found["error"] = f"shm, which is always there: {rows[0].get('error')}"
    return found


def _link_row(bed: Bed, users: int, link: str) -> Row:
    mps = "auto" if link == "cuda_ipc" else "off"
    flags = ("--link", link, "--mps", mps)
    return serve(bed, 0.35, ONE_BY_ONE, _by(bed, users), *flags, link=link, mps=mps)


def _by(bed: Bed, users: int) -> Callable[[Address, Row], None]:
    def use(address: Address, row: Row) -> None:
        found = window(address, bed, users)
        row |= {
            "concurrency": found.concurrency,
            "tokens_per_s": found.tokens_per_s,
            "handoffs_per_s": found.handoffs / found.seconds,
            "ttft_ms": found.ttft_ms,
            "share": found.share,
        }

    return use
