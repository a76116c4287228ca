"""The test suite in stages, two at a time, with the time of each: ``python -m tests.stages``.

Names of stages, as they are printed, choose some of them: ``make test ARGS="lint 'golden seeds'"``.
With TRSERVE_FULL=1 counts are full, a stage may take long, and the others run though one has
failed. Without, a stage that takes more than three minutes is named, and after the first failure
none is begun. Knows no test.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[1]
FULL: Final = os.environ.get("TRSERVE_FULL") == "1"  # as tests/conftest.py reads it
SHOULD_S: Final = 180
LIMIT_S: Final = 3600 if FULL else 600  # a busy machine may have a third of its speed
GRACE_S: Final = 20
AT_ONCE: Final = 2  # one for each core


class Stage(NamedTuple):
    """A command whose exit status says whether it passed."""

    name: str
    command: tuple[str, ...]


def tool(name: str, program: str, *args: str) -> Stage:
    return Stage(name, (f".venv/bin/{program}", *args))


def suite(name: str, *args: str) -> Stage:
    """Tests; one that hangs shows where, before its stage is ended."""
    hang = [] if FULL else ["-o", f"faulthandler_timeout={LIMIT_S - GRACE_S}"]
    return tool(name, "python", "-m", "pytest", *hang, *args)


def found(*patterns: str) -> list[str]:
    """Test files by pattern."""
    files = sorted({str(path.relative_to(ROOT)) for each in patterns for path in ROOT.glob(each)})
    assert files, patterns
    return files


def but(*paths: str) -> list[str]:
    return [each for path in paths for each in ("--ignore", path)]


GOLDEN, ADVERSE, SEEDS = (f"tests/golden/test_{name}.py" for name in ("golden", "adverse", "seeds"))
REFERENCE: Final = found(*(f"tests/golden/test_{start}*.py" for start in ("re", "ro", "sh")))
KILLS: Final = "tests/faults/test_worker_kills.py"
TYPES: Final = tool("types", "mypy")

FIRST: Final = (
    tool("lint", "ruff", "check", "."),
    tool("format", "ruff", "format", "--check", "."),
    suite("shared memory and launcher", "tests/ipc", "tests/launcher", "tests/trace",
          "tests/test_serverproc.py", "tests/test_pitfalls.py", "tests/test_stages.py",
          "tests/test_waiting.py",
          "tests/terminal", *but("tests/ipc/device")),
)  # fmt: skip
# The long ones first: no core then waits long for the last.
BESIDE: Final = (
    suite("models and workers", "tests/models", "tests/workers",
          *but("tests/models/cuda", "tests/workers/cuda", "tests/workers/tp")),
    suite("routers", "tests/router_lib", "tests/router_check", "tests/router_convert",
          "tests/calibration", "tests/training"),
    suite("golden reference", *REFERENCE),
    suite("golden equality", "-rP", GOLDEN),
    suite("golden equality of all else", "tests/golden",
          *but(GOLDEN, ADVERSE, SEEDS, *REFERENCE)),
    suite("scheduling", "tests/sched"),
    suite("several hosts", "tests/edge", "tests/cluster"),
    suite("GPU parts and tensor parallel", "tests/models/cuda", "tests/workers/cuda",
          "tests/workers/tp", "tests/ipc/device", "tests/gpus"),
    suite("killed workers", KILLS),
    suite("black box, a to k", *found("tests/blackbox/test_[a-k]*.py")),
    suite("engine", "tests/engine"),
    suite("golden seeds", "-rP", SEEDS),
    suite("faults", "tests/faults", *but(KILLS)),
    suite("black box, l to z", *found("tests/blackbox/test_[l-z]*.py")),
    suite("golden equality under pressure", "-rP", ADVERSE),
    TYPES,
    suite("embedded pair", "tests/demo"),
    suite("clients, page and documents", "tests/clients", "tests/page", "tests/docs"),
    suite("solver and plans", "tests/solver", "tests/test_plan_command.py"),
    suite("gateway", "tests/gateway"),
    suite("published weights", "tests/realmodel"),
)  # fmt: skip
LAST: Final = (suite("emulated devices and benchmarks", "tests/emulated", "tests/bench"),)


def environment(stage: Stage) -> dict[str, str]:
    """Two pools of threads that fight for two cores cost 10x and more; servers set their own."""
    variables = dict(os.environ)
    variables |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    # Packages that only some tests want, too large for everybody (`make extras`); types are checked
    # without them, because not every environment has them.
    if stage is TYPES:
        variables.pop("PYTHONPATH", None)
    elif (ROOT / ".extras").is_dir():
        paths = [str(ROOT / ".extras"), variables.get("PYTHONPATH", "")]
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return variables


class Suite:
    """Runs stages and prints what each said, whole, when it is over.

    Attributes:
        failed: names of the stages that did.
    """

    def __init__(self, *, limit_s: float = LIMIT_S, goes_on: bool = FULL) -> None:
        self.failed: list[str] = []
        self._limit_s = limit_s
        self._goes_on = goes_on
        self._print = threading.Lock()

    def run(self, stages: tuple[Stage, ...], at_once: int = 1) -> None:
        """Run ``stages``, ``at_once`` at a time, in their order."""
        waiting: queue.SimpleQueue[Stage] = queue.SimpleQueue()
        for stage in stages:
            waiting.put(stage)
        lanes = [threading.Thread(target=self._lane, args=(waiting,)) for _ in range(at_once)]
        for lane in lanes:
            lane.start()
        try:
            for lane in lanes:
                lane.join()
        except KeyboardInterrupt:
            self._goes_on = False  # what runs was interrupted too, and fails
            raise

    def _lane(self, waiting: queue.SimpleQueue[Stage]) -> None:
        while self._goes_on or not self.failed:
            try:
                stage = waiting.get_nowait()
            except queue.Empty:
                return
            self._say(f"-- {stage.name}")
            self._one(stage)

    def _one(self, stage: Stage) -> None:
        began = time.monotonic()
        with tempfile.TemporaryFile() as said:
            try:
                passed = self._passes(stage, said.fileno())
            except OSError as error:
                os.write(said.fileno(), f"{error}\n".encode())
                passed = False
            took_s = time.monotonic() - began
            said.seek(0)
            text = said.read().decode(errors="replace").rstrip()
        if passed:
            late = "" if FULL or took_s <= SHOULD_S else f", more than {SHOULD_S} s"
            end = f"== {stage.name}: {took_s:.0f} s{late}"
        else:
            self.failed.append(stage.name)
            end = f"== {stage.name} failed after {took_s:.0f} s"
        self._say("\n".join(filter(None, [f"== {stage.name}", text, end])))

    def _passes(self, stage: Stage, said: int) -> bool:
        process = subprocess.Popen(
            stage.command,
            cwd=ROOT,
            env=environment(stage),
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
        )
        try:
            return process.wait(self._limit_s) == 0
        except subprocess.TimeoutExpired:
            os.write(said, f"took more than {self._limit_s:g} s\n".encode())
            process.send_signal(signal.SIGINT)  # pytest then ends the servers that it has
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return False

    def _say(self, text: str) -> None:
        with self._print:
            print(text, flush=True)


def chosen(stages: tuple[Stage, ...], names: Sequence[str]) -> tuple[Stage, ...]:
    """Those of ``names``; all, if there are none."""
    return tuple(stage for stage in stages if not names or stage.name in names)


def main(names: Sequence[str] = ()) -> int:
    """Run all, or those of ``names``; the exit code."""
    known = [stage.name for stage in (*FIRST, *BESIDE, *LAST)]
    if unknown := [name for name in names if name not in known]:
        print(f"no stage {unknown[0]!r}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    # Where a shell ignores it, as for what runs in the background, stages would too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    began = time.monotonic()
    suite = Suite()
    for stages, at_once in ((FIRST, 1), (BESIDE, AT_ONCE), (LAST, 1)):
        if FULL or not suite.failed:
            suite.run(chosen(stages, names), at_once)
    print(f"== {'some' if names else 'all'}: {time.monotonic() - began:.0f} s")
    if suite.failed:
        print(f"== failed: {', '.join(suite.failed)}")
    return int(bool(suite.failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
