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
from pathlib import Path
from typing import Any, Final, NamedTuple

from bench.common import Row, parser, print_table, report
from bench.gpu_stages.ending import end_stage


class Stage(NamedTuple):
    """One of them: its limit in seconds, and whether a device without it is no device for us."""

    name: str
    limit_s: float
    mandatory: bool


STAGES: Final = (
    Stage("env", 20, True),
    Stage("attributes", 15, True),
    Stage("host_register", 20, True),
    Stage("ipc", 40, True),
    Stage("waits", 20, False),
    Stage("kernels", 90, False),
    Stage("engine", 90, True),
    Stage("end_to_end", 90, True),
    Stage("flashinfer", 60, False),
    Stage("nccl", 25, False),
    Stage("mps", 60, False),
    Stage("ablation", 110, False),
    Stage("spread", 60, False),
)
"""In this order: where kernels have to be compiled first, there may be no time for the last ones.
Limits add up to more than five minutes, and few stages come near theirs. The limits of mandatory
ones add up to less, and nobody takes time that those behind may need."""

TOTAL_S: Final = 300.0
_LEAST_S: Final = 5.0
_ERROR_LINES: Final = 12


def run_stage(stage: Stage, device: str, limit_s: float, quick: bool) -> Row:
    """Run one stage; whatever becomes of it is a row."""
    command = [sys.executable, "-m", "bench.gpu_stages", stage.name, "--device", device]
    command += ["--quick"] * quick + ["--limit-s", f"{limit_s:.1f}"]
    began = time.monotonic()
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
        detail = _parse(out, err, process.returncode)
        if "error" in detail:
            detail.setdefault("said", _tail(err))
    except subprocess.TimeoutExpired:
        end_stage(process)
        out, err = process.communicate()
        detail = {"error": f"no end within {limit_s:.0f} s", "said": _tail(err)}
    ok = "error" not in detail and not detail.get("unavailable")
    return {
        "stage": stage.name,
        "mandatory": stage.mandatory,
        "ok": ok,
        "took_s": round(time.monotonic() - began, 1),
        "detail": detail,
    }


def _parse(out: str, err: str, code: int) -> dict[str, Any]:
    last = next((line for line in reversed(out.splitlines()) if line.startswith("{")), "")
    try:
        detail: dict[str, Any] = json.loads(last)
    except json.JSONDecodeError:
        return {"error": f"ended with {code} and no result", "said": _tail(err)}
    if code and "error" not in detail:
        detail["error"] = f"ended with {code}"
    return detail


def _tail(text: str) -> list[str]:
    return text.splitlines()[-_ERROR_LINES:]


def _chosen(only: str) -> list[Stage]:
    names = [name for name in only.split(",") if name]
    unknown = set(names) - {stage.name for stage in STAGES}
    if unknown:
        known = ", ".join(stage.name for stage in STAGES)
        raise SystemExit(f"--only {only}: {min(unknown)} is no stage; stages are {known}")
    return [stage for stage in STAGES if not names or stage.name in names]


def run_all(stages: Sequence[Stage], args: argparse.Namespace) -> list[Row]:
    """Run ``stages``, telling each as it ends."""
    rows: list[Row] = []
    deadline = time.monotonic() + args.total_s
    reserved = sum(stage.limit_s for stage in stages if stage.mandatory)
    for stage in stages:
        left = deadline - time.monotonic()
        if stage.mandatory:
            reserved -= stage.limit_s
        limit_s = granted(stage, left, reserved)
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
    return rows


def granted(stage: Stage, left: float, reserved: float) -> float:
    """Seconds for ``stage`` of the ``left`` ones; mandatory stages behind it may need ``reserved``.

    An optional stage takes nothing of those; a mandatory one its share, where there are too few.
    """
    if not stage.mandatory:
        return min(stage.limit_s, left - reserved)
    return stage.limit_s * min(1.0, left / (stage.limit_s + reserved))


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
