"""EMULATED programs of the GPU driver, which answer recorded texts: no GPU, no driver.

The forms of the answers are those of drivers 550 to 595; names and numbers are made up.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from trserve.gpus.programs import MPS_CONTROL, QUERY

MIB = 2**20
_HERE = Path(__file__).parent

NO_COMPUTE_CAP = 'Field "compute_cap" is not a valid field to query.'


def uuid(index: int) -> str:
    return f"GPU-{index:08d}-0000-0000-0000-000000000000"


def line(
    index: int,
    *,
    name: str = "EMULATED H200",
    driver: str = "580.95.05",
    total: str = "143771",
    free: str = "143000",
    mode: str = "Default",
    capability: str = "9.0",
) -> str:
    """One GPU, as --query-gpu of ``topology`` asks for it."""
    return f"{index}, {uuid(index)}, {driver}, {total}, {free}, {mode}, {capability}, {name}"


def matrix(count: int, away: str = "OK") -> str:
    """What ``topo -p2p r`` prints, underlined heading and legend included."""
    heads = "\t".join(f"GPU{index}" for index in range(count))
    rows = [
        f" GPU{row}\t" + "\t".join("X" if row == column else away for column in range(count)) + "\t"
        for row in range(count)
    ]
    legend = "\nLegend:\n\n  X    = Self\n  OK   = Status Ok\n  CNS  = Chipset not supported\n"
    return f" \t\x1b[4m{heads}\x1b[0m\t\n" + "\n".join(rows) + "\n" + legend


def install(directory: Path, name: str, script: str) -> Path:
    """A shell script under the name of a program."""
    directory.mkdir(parents=True, exist_ok=True)
    program = directory / name
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return program


def install_smi(directory: Path, lines: Sequence[str], topology: str | None = None) -> Path:
    """nvidia-smi, EMULATED: the GPUs in ``lines``, and which reach each other."""
    (directory / "gpus.txt").parent.mkdir(parents=True, exist_ok=True)
    (directory / "gpus.txt").write_text("\n".join(lines) + "\n")
    shown = matrix(len(lines)) if topology is None else topology
    (directory / "topology.txt").write_text(shown)
    script = f'case "$1" in topo) cat {directory}/topology.txt;; *) cat {directory}/gpus.txt;; esac'
    return install(directory, QUERY, script)


def install_mps(directory: Path, behaviour: str = "") -> Path:
    """nvidia-cuda-mps-control, EMULATED; ``behaviour`` as its docstring says."""
    directory.mkdir(parents=True, exist_ok=True)
    program = directory / MPS_CONTROL
    source = (_HERE / "emulated_mps_control.py").read_text()
    program.write_text(f"#!{sys.executable} -ISE\n{source}")
    program.chmod(0o755)
    misbehave(directory, behaviour)
    return program


def misbehave(directory: Path, behaviour: str) -> None:
    """Change how the EMULATED daemon behaves from now on."""
    (directory / "EMULATED_MPS").write_text(behaviour)
