"""Everything that only a device can answer, in at most five minutes: stage by stage.

Each stage is a process of its own with a limit, so that one that hangs or crashes costs itself
only. It prints one JSON object; here that becomes a line of ``--lines`` while the run goes on, a
row of the table at the end, and of ``--json``. The exit code is the number of mandatory stages that
failed. ``--device cpu`` runs the same stages over emulations (which say so in their names): that
shows that the script is right, and nothing about a device.

It changes no setting of a GPU, uses no managed memory, and nothing in it waits without a bound.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from bench.common import Row, parser, print_table, report, write_envelope
from bench.gpu_stages.ending import end_stage


class Stage(NamedTuple):
    """One of them: its limit in seconds, and whether a device without it is no device for us."""

    name: str
    limit_s: float
    mandatory: bool


STAGES: Final = (
    Stage("env", 45, True),
    Stage("attributes", 15, True),
    Stage("host_register", 30, True),
    Stage("ipc", 40, True),
    Stage("waits", 20, False),
    Stage("kernels", 90, False),
    Stage("engine", 80, True),
    Stage("end_to_end", 90, True),
    Stage("flashinfer", 60, False),
    Stage("nccl", 25, False),
    Stage("mps", 60, False),
    Stage("ablation", 110, False),
    Stage("spread", 60, False),
)
"""In this order: where kernels have to be compiled first, there may be no time for the last ones.
Limits add up to more than five minutes, and few stages come near theirs. The limits of mandatory
ones add up to five, and nobody takes time that those behind may need. With time to spare, as a few
stages by themselves have it, a stage may take longer than its limit."""

TOTAL_S: Final = 300.0
_LEAST_S: Final = 5.0
_ERROR_LINES: Final = 60
_LAST_WORDS_S: Final = 10.0
"""For the output of a stage that was ended: what is stuck in a driver may hold its pipes."""


def run_stage(stage: Stage, device: str, limit_s: float, quick: bool) -> Row:
    """Run one stage; whatever becomes of it is a row."""
    began = time.monotonic()
    command = [sys.executable, "-m", "bench.gpu_stages", stage.name, "--device", device]
    command += ["--quick"] * quick + ["--until", f"{began + limit_s:.1f}"]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    try:
        out, err = process.communicate(timeout=limit_s)
        detail = _parse(out, process.returncode)
    except subprocess.TimeoutExpired:
        end_stage(process)
        out, err = _last_words(process)
        detail = {**_said_so_far(out), "error": f"no end within {limit_s:.0f} s"}
    if err:
        detail["said"] = err.splitlines()[-_ERROR_LINES:]
    ok = "error" not in detail and not detail.get("unavailable")
    return {
        "stage": stage.name,
        "mandatory": stage.mandatory,
        "ok": ok,
        "took_s": round(time.monotonic() - began, 1),
        "detail": detail,
    }


def _last_words(process: subprocess.Popen[str]) -> tuple[str, str]:
    try:
        return process.communicate(timeout=_LAST_WORDS_S)
    except subprocess.TimeoutExpired:
        return "", "what it said is lost: something of it still holds its pipes"


def _parse(out: str, code: int) -> dict[str, Any]:
    detail = _said_so_far(out)
    if code and "error" not in detail:
        detail["error"] = f"ended with {code}" + ("" if detail else " and no result")
    elif not detail:
        detail["error"] = "ended without a result"
    return detail


def _said_so_far(out: str) -> dict[str, Any]:
    """The objects of all lines, later ones over earlier ones: a stage may end amid any of them."""
    found: dict[str, Any] = {}
    for line in out.splitlines():
        if line.startswith("{"):
            with suppress(json.JSONDecodeError):
                found |= json.loads(line)
    return found


def _chosen(only: str) -> list[Stage]:
    names = [name for name in only.split(",") if name]
    unknown = set(names) - {stage.name for stage in STAGES}
    if unknown:
        known = ", ".join(stage.name for stage in STAGES)
        raise SystemExit(f"--only {only}: {min(unknown)} is no stage; stages are {known}")
    return [stage for stage in STAGES if not names or stage.name in names]


def run_all(stages: Sequence[Stage], args: argparse.Namespace) -> list[Row]:
    """Run ``stages``, telling each as it ends: whoever ends this run has those before."""
    rows: list[Row] = []
    deadline = time.monotonic() + args.total_s
    for number, stage in enumerate(stages):
        limit_s = granted(stage, deadline - time.monotonic(), stages[number + 1 :])
        if limit_s < _LEAST_S:
            row = {"stage": stage.name, "mandatory": stage.mandatory, "ok": False, "took_s": 0.0}
            row["detail"] = {"error": f"skipped: --total-s {args.total_s:g} is over"}
        else:
            row = run_stage(stage, args.device, limit_s, args.quick)
        rows.append(row)
        line = json.dumps(row)
        print(line, flush=True)
        if args.lines is not None:
            with args.lines.open("a") as file:
                file.write(line + "\n")
        if args.json is not None:
            write_envelope(args.json, "gpu_check", rows)
    return rows


def granted(stage: Stage, left: float, behind: Sequence[Stage]) -> float:
    """Seconds for ``stage`` of the ``left`` ones.

    An optional stage takes nothing that mandatory ones ``behind`` it may need; a mandatory one its
    share, where there are too few. Either may take what is left when all behind have theirs.
    """
    reserved = sum(other.limit_s for other in behind if other.mandatory)
    spare = left - sum(other.limit_s for other in behind)
    if not stage.mandatory:
        return min(max(stage.limit_s, spare), left - reserved)
    return max(spare, stage.limit_s * min(1.0, left / (stage.limit_s + reserved)))


def _shown(row: Row) -> Row:
    detail = row["detail"]
    said = detail.get("error") or detail.get("unavailable") or detail.get("summary") or ""
    kind = "mandatory" if row["mandatory"] else "optional"
    state = "ok" if row["ok"] else "unavailable" if "unavailable" in detail else "FAILED"
    return {"stage": row["stage"], "kind": kind, "result": state, "s": row["took_s"], "said": said}


def main() -> int:
    """Run, report; returns the number of mandatory stages that failed."""
    arguments = parser("gpu_check", (__doc__ or "").split("\n\n")[0])
    arguments.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments.add_argument("--only", default="", metavar="A,B", help="these stages only")
    arguments.add_argument("--lines", type=Path, metavar="FILE", help="append each result there")
    arguments.add_argument("--total-s", type=float, default=TOTAL_S)
    args = arguments.parse_args()
    rows = run_all(_chosen(args.only), args)
    title = "gpu_check" if args.device == "cuda" else "gpu_check, EMULATED on a CPU: a dry run"
    for row in rows:
        for table, lines in row["detail"].get("tables", {}).items():
            print_table(f"{row['stage']}: {table}", lines)
    report("gpu_check", args, rows, title, shown=_shown)
    return sum(row["mandatory"] and not row["ok"] for row in rows)


if __name__ == "__main__":
    sys.exit(main())
