"""Which torch is installed, by its files: importing it would take seconds, and the launcher never
does. Knows no device.
"""

from __future__ import annotations

import importlib.util
import re
from importlib import metadata
from pathlib import Path
from typing import Final, NamedTuple

from trserve.errors import ModelUnavailableError

_CUDA: Final = re.compile(r"^cuda\b.*= *['\"]([0-9.]+)['\"]", re.MULTILINE)


class TorchBuild(NamedTuple):
    """An installed torch: its version, and the CUDA that it was built with, None for none."""

    version: str
    cuda: str | None


def find_torch() -> TorchBuild | None:
    """What is installed, read from torch's own files; None for nothing."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    stated = Path(spec.origin).with_name("version.py")
    text = stated.read_text(encoding="utf-8") if stated.is_file() else ""
    found = _CUDA.search(text)
    return TorchBuild(version_of("torch") or "unknown", found[1] if found else None)


def version_of(distribution: str) -> str | None:
    """The version of an installed package, None where there is none."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def check_torch_for_gpus() -> None:
    """Raise ModelUnavailableError unless torch can use GPUs."""
    build = find_torch()
    if build is not None and build.cuda:
        return
    had = f"torch {build.version} is built without CUDA" if build else "torch is not installed"
    raise ModelUnavailableError(
        f"--device cuda: {had}\ninstall a build of torch for CUDA in this environment, or use "
        "--device cpu, or --device emulated, which only takes a device's time"
    )
