"""What ``trserve doctor`` says of GPUs, of which there are none: the driver is EMULATED."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.gpus.programs import install_mps, install_smi, line, matrix
from trserve.config import LaunchConfig, config_from_flags
from trserve.doctor import checks
from trserve.doctor.findings import Finding, Level, lines
from trserve.errors import ModelUnavailableError
from trserve.gpus import proven
from trserve.gpus.programs import MPS_CONTROL
from trserve.ipc.device import choice


@pytest.fixture(autouse=True)
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two GPUs that reach each other, an MPS daemon to be had, and CuPy."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(choice, "find_spec", lambda name: object())
    install_smi(tmp_path, [line(0), line(1)])
    install_mps(tmp_path)
    return tmp_path


def config(**flags: Any) -> LaunchConfig:
    return config_from_flags({"device": "cuda", **flags})


def diagnose(**flags: Any) -> list[Finding]:
    """The findings about GPUs, as a machine with torch for CUDA 13 has them."""
    diagnosed = checks.Diagnosed(config(**flags), "13.0")
    diagnosed.run()
    return diagnosed.findings


def said(found: list[Finding], check: str) -> list[str]:
    return [finding.what for finding in found if finding.check == check]


def bad(found: list[Finding]) -> dict[str, Finding]:
    assert all(f.parameter and f.fix for f in found if f.level is not Level.OK)
    return {f.check: f for f in found if f.level is not Level.OK}


def test_a_pair_on_one_gpu() -> None:
    found = diagnose()
    assert not bad(found)
    assert said(found, "driver") == ["580.95.05, 2 x EMULATED H200"]
    assert said(found, "GPU placement") == ["tiny on GPU 0, small on GPU 0; GPU 0 is shared"]
    (memory,) = said(found, "GPU memory")
    assert memory.startswith("GPU 0: ") and "tiny" in memory and "KV for" in memory
    (mps,) = said(found, "MPS")
    assert "a daemon of the server's own on GPU 0, 2 models with at most 100 %" in mps
    assert said(found, "link") == ["tiny - small: cuda_ipc (one GPU under MPS)"]
    assert not said(found, "P2P"), "one GPU reaches itself"


def test_a_pair_on_two_gpus(driver: Path) -> None:
    found = diagnose(gpus=((0,), (1,)))
    assert not bad(found)
    assert len(said(found, "GPU memory")) == 2
    assert said(found, "MPS") == ["not needed: no GPU is shared"]
    assert said(found, "P2P") == ["the GPUs in use reach each other"]
    assert said(found, "link") == ["tiny - small: cuda_ipc (GPUs that reach each other's memory)"]
    install_smi(driver, [line(0), line(1)], matrix(2, away="CNS"))
    found = diagnose(gpus=((0,), (1,)))
    assert "the chipset does not support it" in bad(found)["P2P"].what
    assert said(found, "link") == [
        "tiny - small: host_mapped (these GPUs cannot reach each other's memory)"
    ]


def test_no_mps(driver: Path) -> None:
    (driver / MPS_CONTROL).unlink()
    found = diagnose()
    assert list(bad(found)) == ["MPS"]
    assert bad(found)["MPS"].level is Level.WARNING
    assert "take turns" in bad(found)["MPS"].what
    assert "host_mapped" in said(found, "link")[0]
    off = diagnose(mps="off")
    assert not bad(off) and "take turns" in said(off, "MPS")[0]


def test_a_model_that_spans_gpus() -> None:
    found = diagnose(models=("tiny", "small"), gpus=((0,), (0, 1)))
    assert "takes no part in MPS" in said(found, "MPS")[0]
    assert "GPU 0 is shared" in said(found, "GPU placement")[0]


@pytest.mark.parametrize(
    ("gpu", "flags", "check", "expected"),
    [
        ({"driver": "550.54"}, {}, "driver", "580 or later"),
        ({"free": "900"}, {}, "GPU placement", "smaller models"),
        ({}, {"gpus": ((0,), (7,))}, "GPU placement", "there are 0, 1"),
        ({}, {"link": "nccl"}, "link", "leave --link out"),
        ({}, {"quantization": "int8"}, "GPU placement", "a GPU runs bfloat16"),
    ],
)
def test_faults(driver: Path, gpu: Any, flags: Any, check: str, expected: str) -> None:
    install_smi(driver, [line(0, **gpu), line(1, **gpu)])
    found = bad(diagnose(**flags))
    assert list(found) == [check]
    assert found[check].level is Level.FAULT
    assert expected in found[check].what + found[check].fix


def test_gpus_that_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert list(bad(diagnose())) == ["GPUs"]


def test_everything_says_that_it_is_unproven_until_a_device_has_shown_it(monkeypatch) -> None:
    about = ("driver", "GPU placement", "GPU memory", "MPS", "P2P", "link")
    for found in (diagnose(), diagnose(gpus=((0,), (1,)))):
        for finding in found:
            if finding.check in about:
                assert "(unproven on a device)" in lines(finding)[0]
    monkeypatch.setattr(proven, "PROVEN", frozenset({"env", "engine", "ipc", "mps"}))
    assert not any(finding.unproven for finding in diagnose())


def test_a_launch_without_torch_for_gpus_says_one_thing() -> None:
    """As on this machine, if its torch is for the CPU; else there is nothing to see."""
    from trserve.gpus.torch_build import find_torch
    from trserve.plan import make_plan

    build = find_torch()
    if build is not None and build.cuda:
        pytest.skip("this torch is for GPUs")
    with pytest.raises(
        ModelUnavailableError, match=r"--device cuda: torch .* without CUDA"
    ) as said:
        make_plan(config())
    assert said.value.exit_code == 3


def test_stages_are_those_of_the_script() -> None:
    script = Path(__file__).parents[2] / "bench" / "gpu_check.py"
    if not os.path.exists(script):
        pytest.skip("no bench.gpu_check here")
    text = script.read_text()
    for stage in (proven.DRIVER, proven.MEMORY, proven.LINKS, proven.MPS, *proven.PROVEN):
        assert f'Stage("{stage}"' in text
