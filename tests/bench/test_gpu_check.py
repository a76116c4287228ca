"""The check of a device, as a dry run: that it runs, tells failures, and ends in time."""

import json
import subprocess
import sys

import pytest

from bench.gpu_check import STAGES, Stage, run_stage
from bench.gpu_stages.__main__ import MODULES
from bench.gpu_stages.engine import bytes_read
from bench.gpu_stages.machine import ATTRIBUTES
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
