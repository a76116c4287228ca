"""`trserve doctor` finds each fault that is planted, and says what to do about it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.serverproc import server_env
from trserve import control_groups, demo
from trserve.cli import main
from trserve.doctor import limits, software
from trserve.doctor.findings import Level
from trserve.doctor.limits import Needs
from trserve.gpus.torch_build import TorchBuild

GIB = 2**30


def doctor(*args: str, **env: str) -> dict[str, Any]:
    """Its report, made in this process."""
    offline = {"HF_HOME": "/nonexistent", "HF_HUB_CACHE": None, **env}
    done = CliRunner().invoke(main, ["doctor", "--json", "--port", "0", *args], env=offline)
    report = json.loads(done.stdout)
    assert report["exit_code"] == done.exit_code
    return report


def limited(runtime: Path, ulimit: str) -> dict[str, Any]:
    """The report of a process of its own, which has limits that could not be taken back here."""
    command = [sys.executable, "-m", "trserve", "doctor", "--json", "--port", "0"]
    done = subprocess.run(
        ["bash", "-c", f'ulimit {ulimit} && exec "$@"', "bash", *command],
        capture_output=True,
        text=True,
        timeout=60,
        env=server_env(runtime),
    )
    assert "Traceback" not in done.stderr, done.stderr
    report = json.loads(done.stdout)
    assert report["exit_code"] == done.returncode
    return report


def bad(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The findings that are not well, by check; each says what, which parameter and what to do."""
    found = {f["check"]: f for f in report["findings"] if f["level"] != "ok"}
    assert all(f["what"] and f["parameter"] and f["fix"] for f in found.values()), found
    return found


def only(report: dict[str, Any], check: str, level: str = "fault") -> dict[str, Any]:
    found = bad(report)
    assert list(found) == [check]
    assert found[check]["level"] == level
    assert report["exit_code"] == Level[level.upper()]
    return found[check]


def pair_with_another_tokenizer(tmp_path: Path) -> str:
    """The embedded pair, in whose second tokenizer two tokens have changed places."""
    for name in ("tiny", "small"):
        shutil.copytree(demo.model_path(name), tmp_path / name)
    file = tmp_path / "small" / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    first, second = list(vocabulary)[300:302]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(content))
    return f"{tmp_path / 'tiny'},{tmp_path / 'small'}"


def test_all_is_well(tmp_path):
    report = limited(tmp_path, "-n 2048")
    assert bad(report) == {}
    assert report["exit_code"] == 0
    checks = {f["check"] for f in report["findings"]}
    assert {"python", "torch", "models", "tokenizers", "memory", "port", "open files"} <= checks
    assert os.listdir(tmp_path) == []


def test_two_tokenizers_that_differ(tmp_path):
    models = pair_with_another_tokenizer(tmp_path / "models")
    found = only(doctor("--models", models), "tokenizers")
    assert "tiny" in found["what"]
    assert "small" in found["what"]
    assert found["parameter"] == "--models"


def test_a_port_that_is_taken(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        found = only(doctor("--port", port), "port")
    assert port in found["what"]
    assert "--port" in found["fix"]


def test_256_open_files(tmp_path):
    found = only(limited(tmp_path, "-n 256"), "open files")
    assert "256" in found["what"]
    assert "ulimit -Hn" in found["fix"]
    assert "--max-requests 192" in found["fix"]


def test_files_for_the_requests_but_not_for_those_that_wait(tmp_path):
    found = only(limited(tmp_path, "-n 512"), "open files", "warning")
    assert "--max-queue" in found["what"]


@pytest.mark.parametrize(
    ("ulimit", "check", "fix"),
    [("-v 1200000", "address space", "ulimit -v"), ("-f 1024", "shared memory", "lift the limit")],
)
def test_limits_of_memory(tmp_path, ulimit, check, fix):
    found = only(limited(tmp_path, ulimit), check)
    assert found["fix"].startswith(fix)


def test_missing_weights_hide_nothing_else(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        report = doctor("--models", "0.6b,small", "--port", port)
    found = bad(report)
    assert set(found) == {"models", "port"}
    assert found["models"]["parameter"] == "--models 0.6b"
    assert "checkpoint directory" in found["models"]["fix"]


def test_too_little_memory_for_the_models(tmp_path):
    models = ("--models", "32b,32b,32b,32b,32b,32b,32b,32b", "--load-format", "dummy")
    found = only(doctor(*models, "--dtype", "float32"), "memory")
    assert "GiB" in found["what"]
    assert "--quantization int8" in found["fix"]


@pytest.mark.parametrize(
    ("text", "expected"), [("max-queu: 3", "max_queue"), ("port: many", "whole number")]
)
def test_a_bad_key_of_the_configuration(tmp_path, text, expected):
    file = tmp_path / "server.yaml"
    file.write_text(text)
    found = only(doctor("--config", str(file)), "configuration")
    assert expected in found["what"] + found["fix"]
    assert str(file) in found["what"]


def test_a_variable_that_is_no_setting(tmp_path):
    report = doctor(TRSERVE_MAX_QUEU="3", TRSERVE_PORT="tcp://10.0.0.1:80")
    found = only(report, "configuration", "warning")
    assert found["parameter"] == "TRSERVE_MAX_QUEU"
    assert "TRSERVE_MAX_QUEUE" in found["fix"]


@pytest.mark.parametrize("kind", ["garbage", "missing"])
def test_an_unreadable_router_checkpoint(tmp_path, kind):
    file = tmp_path / "router.safetensors"
    if kind == "garbage":
        file.write_bytes(b"\x10" * 64)
    given = ["--router", "citer", "--router-config", f"checkpoint={file}"]
    found = only(doctor(*given), "router")
    assert str(file) in found["what"]
    assert found["fix"]


def test_a_router_checkpoint_that_fits():
    report = doctor("--router", "r2r")
    assert bad(report) == {}
    (router,) = [f for f in report["findings"] if f["check"] == "router"]
    assert "checkpoint" in router["what"]


def test_a_gpu_is_asked_for_and_nothing_is_there(tmp_path):
    report = doctor("--device", "cuda", PATH="/usr/bin:/bin")
    found = bad(report)
    assert {"torch", "driver", "flashinfer"} <= set(found)
    assert "without CUDA" in found["torch"]["what"]
    assert "--device cpu" in found["torch"]["fix"]
    assert "nvidia-smi" in found["driver"]["what"]
    assert all(found[check]["unproven_on_a_device"] for check in ("torch", "driver", "flashinfer"))
    assert report["exit_code"] == 2


def test_torch():
    assert software.check_torch(TorchBuild("2.9", "13.0"), "cuda").level is Level.OK
    assert software.check_torch(TorchBuild("2.9+cpu", None), "cpu").level is Level.OK
    assert software.check_torch(TorchBuild("2.9+cpu", None), "cuda").level is Level.FAULT
    assert software.check_torch(None, "cpu").level is Level.FAULT


def test_torch_is_found_without_importing_it():
    code = (
        "import sys; from trserve.gpus.torch_build import find_torch; print(find_torch().version)"
    )
    code += "; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    import torch

    assert done.stdout.strip() == torch.__version__


def test_an_old_python():
    found = software.check_python((3, 10, 4))
    assert found.level is Level.FAULT
    assert "3.10.4" in found.what
    assert "PYTHON=python3.11" in found.fix


GROUPS_V1 = ("5:memory:/a/b", "memory/a", "memory.limit_in_bytes", "memory.usage_in_bytes")
GROUPS_V2 = ("0::/a/b", "a", "memory.max", "memory.current")


@pytest.mark.parametrize(("line", "group", "most", "used"), [GROUPS_V1, GROUPS_V2])
@pytest.mark.parametrize(
    ("limit", "level"), [(8 * GIB, Level.OK), (4 * GIB, Level.WARNING), (2 * GIB, Level.FAULT)]
)
def test_a_control_group_that_is_too_small(
    tmp_path, monkeypatch, line, group, most, used, limit, level
):
    """The limit is one of a parent's; its page cache counts as free."""
    directory = tmp_path / "cgroup" / group
    (directory / "b").mkdir(parents=True)
    (directory / most).write_text(f"{limit}\n")
    (directory / used).write_text(f"{GIB + 5000}\n")
    (directory / "memory.stat").write_text(f"anon 7\ninactive_file {GIB + 5000}\n")
    (directory / "b" / most).write_text("max\n")
    own = tmp_path / "own"
    own.write_text(f"1:cpu:/a\n{line}\n")
    monkeypatch.setattr(control_groups, "_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(control_groups, "_OWN_CGROUPS", own)
    found = limits.check_memory_limit(Needs(resident=3 * GIB, kv=2 * GIB, largest=2 * GIB))
    assert found.level is level
    if level is Level.WARNING:
        assert "--memory 1024m" in found.fix
    if level is Level.FAULT:
        assert "MemoryMax" in found.fix


def test_small_shm_matters_to_several_gpus_only(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "_SHM", tmp_path / "none")
    assert limits.check_shm(1).level is Level.OK
    found = limits.check_shm(2)
    assert found.level is Level.WARNING
    assert "--shm-size" in found.fix


def test_text_for_a_person(tmp_path):
    file = tmp_path / "server.yaml"
    file.write_text("prot: 1")
    done = CliRunner().invoke(main, ["doctor", "--port", "0", "--config", str(file)])
    assert done.exit_code == 2
    assert "did you mean port" in done.output
    assert done.output.splitlines()[-1] == "1 fault"
