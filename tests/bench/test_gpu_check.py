"""The check of a device, as a dry run: that it runs, tells failures, and ends in time."""

import json
import subprocess
import sys
import time

import pytest
import torch

from bench.gpu_check import STAGES, TOTAL_S, Stage, granted, run_stage
from bench.gpu_stages import kernels, served
from bench.gpu_stages.__main__ import MODULES
from bench.gpu_stages.ending import end_stage
from bench.gpu_stages.engine import bytes_read
from bench.gpu_stages.machine import ATTRIBUTES
from tests.procfs import descendants, start_time
from trserve.models.aliases import alias_spec


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


SLEEPER = "import time; time.sleep(60)"
STARTER = f"""
import subprocess, sys, time
for apart in (True, False):
    subprocess.Popen([sys.executable, "-c", {SLEEPER!r}], start_new_session=apart)
print("started", flush=True)
time.sleep(60)
"""


def test_nothing_outlives_a_stage_that_is_ended():
    """Neither a server, which leads a session of its own, nor what belongs to the stage's group."""
    stage = subprocess.Popen(
        [sys.executable, "-c", STARTER], stdout=subprocess.PIPE, text=True, process_group=0
    )
    assert stage.stdout.readline() == "started\n"
    below = descendants(stage.pid)
    assert len(below) == 2
    end_stage(stage)
    stage.communicate(timeout=5)
    assert all(start_time(pid) is None for pid in below)


def test_mandatory_stages_have_time_whatever_the_others_take():
    mandatory = [stage for stage in STAGES if stage.mandatory]
    assert sum(stage.limit_s for stage in mandatory) <= TOTAL_S
    for total in (TOTAL_S, 60.0):
        left, reserved = total, sum(stage.limit_s for stage in mandatory)
        for stage in STAGES:
            reserved -= stage.limit_s * stage.mandatory
            limit_s = granted(stage, left, reserved)
            if stage.mandatory:
                assert limit_s >= min(1.0, total / TOTAL_S) * stage.limit_s
            left -= max(0.0, limit_s)
        assert left >= -1e-6


def test_links_that_there_is_no_time_for_are_left_out(monkeypatch):
    monkeypatch.setattr(served, "bed_of", lambda device, quick: None)
    monkeypatch.setattr(served, "_link_row", link_row)
    found = served.end_to_end("cuda", False, served._SPARE_S + 0.25)
    assert [row["link"] for row in found["tables"]["links"]] == ["shm"]
    assert found["missing"] == ["host_mapped", "cuda_ipc"] and "error" not in found
    assert served.end_to_end("cuda", False)["missing"] == []


def link_row(bed, users, link):
    time.sleep(0.15)
    return {"link": link, "handoffs_per_s": 1.0}


def test_one_layer_makes_ready_what_a_model_needs():
    kernels._one_layer("tiny", torch.device("cpu"))


def test_a_job_that_does_not_end_is_ended(monkeypatch):
    start = lambda name, device: subprocess.Popen([sys.executable, "-c", SLEEPER])  # noqa: E731
    monkeypatch.setattr(kernels, "_start", start)
    found = kernels.kernels("cpu", True, kernels._SPARE_S + 0.2)
    assert found["tables"]["jobs"][0]["said"] == "no end in time" and found["unavailable"]


HEADER = """
CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16
CU_DEVICE_ATTRIBUTE_HOST_NATIVE_ATOMIC_SUPPORTED = 86
CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS = 89
CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED = 90
CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM = 91
CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES = 98
CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED = 99
CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS = 122
CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR = 123
CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED = 125
CU_DEVICE_ATTRIBUTE_MPS_ENABLED = 133
"""


def test_attributes_have_the_numbers_of_the_header():
    words = {
        "host_pointer_is_device_pointer": "HOST_POINTER_FOR_REGISTERED",
        "host_register": "HOST_REGISTER_SUPPORTED",
        "stream_64_bit_operations": "64_BIT_STREAM",
        "stream_wait_value_nor": "STREAM_WAIT_VALUE_NOR",
        "host_native_atomics": "HOST_NATIVE_ATOMIC",
        "ipc_events": "IPC_EVENT",
        "multiprocessors": "MULTIPROCESSOR",
    }
    lines = {int(line.split(" = ")[1]): line for line in HEADER.split("\n") if line}
    for number, name in ATTRIBUTES.items():
        assert words.get(name, name.upper()) in lines[number]


def test_a_step_reads_each_weight_once_and_no_second_table():
    tied, own = alias_spec("0.6b"), alias_spec("32b")
    assert tied.tie_word_embeddings and not own.tie_word_embeddings
    assert bytes_read(tied) == 2 * tied.num_parameters
    assert bytes_read(own) == 2 * (own.num_parameters - own.vocab_size * own.hidden_size)


@pytest.mark.slow
def test_the_whole_dry_run(tmp_path):
    done, rows = check(tmp_path)
    assert done.returncode == 0, done.stdout[-2000:]
    assert rows["engine"]["detail"]["golden"]["different"] == 0
    assert rows["engine"]["detail"]["replay"]["different"] == 0
    assert rows["ablation"]["detail"]["missing"] == []
