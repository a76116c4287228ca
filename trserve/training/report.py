"""A trained router: its tensors, what stands beside them, and how well it finds what it should.

Writes the files that the server loads, and ``report.json``. Knows no training.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from trserve.errors import ConfigError
from trserve.training.curve import Held, Point

REPORT: Final = "report.json"
_DIGITS: Final = 6


@dataclass(frozen=True, eq=False)
class Trained:
    """What training leaves.

    Attributes:
        router: its name on the command line.
        parameter: name of its threshold.
        file: name of the file of ``tensors``.
        held: the held-out rows under it.
        chosen: the threshold to begin with.
        facts: what the JSON beside the file says, besides the threshold.
        made_from: what else the report tells.
    """

    router: str
    parameter: str
    file: str
    tensors: Mapping[str, torch.Tensor]
    held: Held
    chosen: Point
    facts: Mapping[str, Any] = field(default_factory=dict)
    made_from: Mapping[str, Any] = field(default_factory=dict)


def prepare(directory: Path) -> None:
    """Create ``directory`` and try a file in it: what is to be written there takes hours.

    Raises:
        ConfigError: nothing can be written there.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".trserve-") as probe:
            probe.write(b"\n")
    except OSError as error:
        raise _unwritable(directory, error) from None


def write(trained: Trained, directory: Path) -> dict[str, Any]:
    """Write the checkpoint and its report into ``directory``; returns the report.

    Raises:
        ConfigError: it cannot be written.
    """
    report = _report(trained)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        checkpoint = directory / trained.file
        save_file({n: t.contiguous() for n, t in trained.tensors.items()}, checkpoint)
        stated = {**trained.facts, "threshold": trained.chosen.threshold}
        _write_json(checkpoint.with_suffix(".json"), stated)
        _write_json(directory / REPORT, report)
    except (OSError, SafetensorError) as error:
        raise _unwritable(directory, error) from None
    return report


def _unwritable(directory: Path, error: OSError | SafetensorError) -> ConfigError:
    reason = getattr(error, "strerror", None) or error
    return ConfigError(
        f"--out {directory}: cannot be written: {reason}; name a folder with room where this user "
        "may write"
    )


def _report(trained: Trained) -> dict[str, Any]:
    return {
        "router": trained.router,
        "checkpoint": trained.file,
        "parameter": trained.parameter,
        "threshold": trained.chosen.threshold,
        "at_threshold": _rounded(trained.chosen),
        "average_precision": round(trained.held.average_precision(), _DIGITS),
        **trained.made_from,
        "curve": [_rounded(point) for point in trained.held.curve()],
    }


def _rounded(point: Point) -> dict[str, float]:
    # A threshold is a cut between scores; rounded, it would cut elsewhere.
    shares = {n: round(v, _DIGITS) for n, v in point._asdict().items() if n != "threshold"}
    return {"threshold": point.threshold, **shares}


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
