"""The check of a device, as a dry run: that it runs, tells failures, and ends in time."""

import json
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
import torch

from bench import gpu_check
from bench.closed_loop import Window
from bench.common import print_table
from bench.endpoint import NotAvailableError
from bench.gpu_check import STAGES, TOTAL_S, Stage, granted, run_stage
from bench.gpu_stages import ablation, engine, kernels, parts, served
from bench.gpu_stages.__main__ import MODULES
from bench.gpu_stages.ending import end_stage
from bench.gpu_stages.engine import bytes_read
from bench.gpu_stages.machine import ATTRIBUTES
from tests.procfs import descendants, start_time
from tests.serverproc import StartFailedError
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


TALKER = """
import sys, time
print('{"first": 1}', flush=True)
print('{"first": 2, "tables": {}}', flush=True)
print('{"first": 3, "tab', end="", flush=True)
print("what it says", file=sys.stderr, flush=True)
time.sleep(60)
"""


def test_what_an_ended_stage_had_found_is_kept(monkeypatch):
    monkeypatch.setattr(
        gpu_check.subprocess, "Popen", lambda command, **more: POPEN([*PYTHON, TALKER], **more)
    )
    row = run_stage(Stage("engine", 60, True), "cpu", 2.0, quick=True)
    found = row["detail"]
    assert found["first"] == 2 and "no end within" in found["error"] and not row["ok"]
    assert found["said"] == ["what it says"]


POPEN = subprocess.Popen
PYTHON = (sys.executable, "-c")


def test_results_are_there_before_the_end(tmp_path, monkeypatch):
    """Whoever ends the whole run has the stages before."""

    def stage_or_end(stage, *_):
        if stage.name != "env":
            raise KeyboardInterrupt
        return {"stage": "env", "mandatory": True, "ok": True, "took_s": 1.0, "detail": {}}

    monkeypatch.setattr(gpu_check, "run_stage", stage_or_end)
    file = tmp_path / "check.json"
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--device", "cpu", "--json", str(file)])
    with pytest.raises(KeyboardInterrupt):
        gpu_check.main()
    assert [row["stage"] for row in json.loads(file.read_text())["results"]] == ["env"]
    assert [path.name for path in tmp_path.iterdir()] == ["check.json"]


def test_what_brackets_hold_is_no_markup(capsys):
    print_table("errors", [{"said": "no [/usr/lib] and no Final[int]"}])
    assert "no [/usr/lib] and no Final[int]" in capsys.readouterr().out


def test_a_part_that_fails_costs_itself(capsys):
    found = parts.Parts()
    assert found.run("one", lambda: 1 / 0) is None
    assert found.run("other", lambda: {"x": 1}) == {"x": 1}
    assert found.found == {
        "failed": {"one": "ZeroDivisionError: division by zero"},
        "other": {"x": 1},
    }
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert said[-1] == found.found and "other" not in said[0]


def test_a_part_of_the_engine_that_fails_hides_no_other(monkeypatch, capsys):
    def fail(*_):
        raise MemoryError("no room")

    monkeypatch.setattr(engine, "golden_equality", lambda *_: {"different": 1, "compared": 4})
    for name in ("replay_equals_eager", "bfloat16_share"):
        monkeypatch.setattr(engine, name, fail)
    monkeypatch.setattr(engine, "step_times", lambda *_: {"model": "tiny"})
    monkeypatch.setattr(engine, "host_time", lambda *_: {"p50_us": 10.0})
    found = engine.engine("cpu", True)
    assert found["tables"] == {"steps": [{"model": "tiny"}]}
    assert set(found["failed"]) == {"replay", "bfloat16"}
    assert "no room" in found["error"] and "differ from the CPU engine's" in found["error"]
    capsys.readouterr()


def test_a_server_that_does_not_start_is_a_row_with_all_it_said(monkeypatch):
    bed = served.beds_of("cpu", True)[0]
    row = served.serve(bed, 2.0, served.ONE_BY_ONE, lambda address, row: None, link="shm")
    assert row["link"] == "shm" and "exit code 2" in row["error"]
    assert "p = 2 is outside 0 to 1" in row["error"]
    assert row["said"]


def test_what_a_user_meets_is_a_row_too(monkeypatch):
    monkeypatch.setattr(served, "launched", empty)

    def use(address, row):
        row["before"] = 1
        raise ExceptionGroup("users", [TimeoutError("no token"), ValueError("no [DONE]")])

    row = served.serve(served.beds_of("cpu", True)[0], 0.3, served.ONE_BY_ONE, use)
    assert row["before"] == 1
    assert "TimeoutError: no token" in row["error"] and "ValueError: no [DONE]" in row["error"]


@contextmanager
def empty(arguments, environment, **_):
    yield None


def test_a_variant_has_a_row_for_each_share(monkeypatch):
    asked = []

    async def set_router(address, key, values):
        asked.append(values["p"])

    def window(address, bed, users, only=None, warm_up_s=0.0):
        return Window(users, 1.0, (users, users), 0, 0.0, None, None, {}, (1, 2))

    monkeypatch.setattr(ablation, "set_router", set_router)
    monkeypatch.setattr(ablation, "window", window)
    monkeypatch.setattr(ablation, "serve", serve)
    bed = served.beds_of("cpu", True)[0]
    delayed, alone = ablation.VARIANTS[0], ablation.VARIANTS[4]
    rows = ablation._variant_rows(bed, delayed, (0.35, 0.05), (1, 4))
    assert [row["p"] for row in rows] == asked == [0.35, 0.05]
    assert all(row["N=4"] == 8.0 and row["B N=4"] == [1, 2] for row in rows)
    assert len(ablation._variant_rows(bed, alone, (0.35, 0.05), (1,))) == 1


def serve(bed, p, variant, use, *flags, environment):
    row = {"start_s": 1.0}
    use(None, row)
    return row


def test_a_refusal_says_what_the_server_said():
    error = NotAvailableError("leave --link out")
    error.__cause__ = StartFailedError(3, "no CuPy\nleave --link out\n")
    assert "no CuPy" in parts.told(error)


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
        left = total
        for number, stage in enumerate(STAGES):
            limit_s = granted(stage, left, STAGES[number + 1 :])
            if stage.mandatory:
                assert limit_s >= min(1.0, total / TOTAL_S) * stage.limit_s
            left -= max(0.0, limit_s)
        assert left >= -1e-6


def test_a_stage_has_what_nobody_behind_it_can_take():
    by_name = {stage.name: stage for stage in STAGES}
    assert granted(by_name["ablation"], 540.0, []) == 540.0
    behind = [by_name["ablation"]]
    assert granted(by_name["kernels"], 540.0, behind) == 540.0 - by_name["ablation"].limit_s
    assert granted(by_name["engine"], 540.0, [by_name["end_to_end"]]) == 450.0


def test_links_that_there_is_no_time_for_are_left_out(monkeypatch):
    monkeypatch.setattr(served, "beds_of", lambda device, quick: [None])
    monkeypatch.setattr(served, "_link_row", link_row)
    found = served.end_to_end("cuda", False, served.SPARE_S + 0.25)
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
    for name in ("tiny", "small"):
        assert rows["engine"]["detail"][f"golden_{name}"]["different"] == 0
    assert rows["engine"]["detail"]["replay"]["different"] == 0
    assert rows["ablation"]["detail"]["missing"] == []
