"""Triton kernels against torch: interpreted without a device, and on one where there is one."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from tests.models.cuda import kernel_checks

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="triton is not installed: GPU kernels neither interpreted nor compiled",
)


@pytest.fixture(scope="module")
def interpreted(full: bool) -> subprocess.CompletedProcess[str]:
    """All checks in a process of their own: triton reads the variable as it is imported."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.models.cuda.kernel_checks"]
    return subprocess.run(
        [*command, "full"] if full else command,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@needs_triton
@pytest.mark.parametrize("name", kernel_checks.CHECKS)
def test_an_interpreted_kernel_computes_what_torch_does(interpreted, name):
    passed = [line.split()[0] for line in interpreted.stdout.splitlines()]
    assert name in passed, interpreted.stderr[-2000:]


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: kernels not run on a device"
)
@pytest.mark.parametrize("name", kernel_checks.CHECKS)
def test_a_kernel_on_a_device_computes_what_torch_does(name, full):
    kernel_checks.CHECKS[name]("cuda", full)
