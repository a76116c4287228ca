"""The check of a device, as a dry run: that it runs, tells failures, and ends in time."""

import json
import subprocess
import sys

import pytest

from bench.gpu_check import STAGES, Stage, run_stage
from bench.gpu_stages.__main__ import MODULES


def check(tmp_path, *flags):
    command = [sys.executable, "-m", "bench.gpu_check", "--device", "cpu", "--quick"]
    file, lines = tmp_path / "check.json", tmp_path / "lines"
    command += ["--json", file, "--lines", lines, *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    rows = json.loads(file.read_text())["results"]
    assert [json.loads(line) for line in lines.read_text().splitlines()] == rows
    return done, {row["stage"]: row for row in rows}


def test_a_dry_run_says_that_it_is_one(tmp_path):
    done, rows = check(tmp_path, "--only", "env,attributes,ipc,nccl")
    assert done.returncode == 0
    assert "EMULATED on a CPU: a dry run" in done.stdout
    assert rows["ipc"]["detail"]["wrong"] == 0
    assert rows["ipc"]["detail"]["medium"] == "emulated-cuda_ipc"
    assert not rows["nccl"]["ok"] and rows["nccl"]["detail"]["unavailable"]


def test_what_there_is_no_time_for_is_told_and_counts(tmp_path):
    done, rows = check(tmp_path, "--only", "env,attributes", "--total-s", "1")
    assert done.returncode == 2
    assert all("--total-s 1 is over" in row["detail"]["error"] for row in rows.values())


def test_a_stage_that_does_not_end_is_ended():
    row = run_stage(Stage("engine", 60, True), "cpu", 0.3, quick=True)
    assert not row["ok"]
    assert "no end within" in row["detail"]["error"]


def test_every_stage_is_there():
    assert {stage.name for stage in STAGES} == set(MODULES)


@pytest.mark.slow
def test_the_whole_dry_run(tmp_path):
    done, rows = check(tmp_path)
    assert done.returncode == 0, done.stdout[-2000:]
    assert rows["engine"]["detail"]["golden"]["different"] == 0
    assert rows["engine"]["detail"]["replay"]["different"] == 0
    assert rows["ablation"]["detail"]["missing"] == []
