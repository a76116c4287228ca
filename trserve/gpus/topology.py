"""The GPUs of this machine and which of them reach each other's memory, as the driver tells it.

Asks ``nvidia-smi``, whose numbers follow the PCI bus, so that a GPU keeps its number whatever else
is set; everything behind this file goes by UUID. Knows no models.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from trserve.gpus.programs import QUERY, DriverError, find_program, run_program

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
EXCLUSIVE: Final = "Exclusive_Process"
PROHIBITED: Final = "Prohibited"

_FIELDS: Final = ("index", "uuid", "driver_version", "memory.total", "memory.free", "compute_mode")
_CAPABILITY: Final = "compute_cap"
_NAME: Final = "name"
"""Last in a query: the only field that might hold a comma."""

_MIB: Final = 2**20
_ESCAPES: Final = re.compile(r"\x1b\[[0-9;]*m")
_GPU: Final = re.compile(r"GPU(\d+)")
_REACHED: Final = "OK"
_WHY_NOT: Final = {
    "CNS": "the chipset does not support it",
    "GNS": "the GPU does not support it",
    "TNS": "the topology does not support it",
    "NS": "it is not supported",
    "DR": "it is disabled in the driver's settings",
    "U": "the driver does not know",
}
"""The legend of ``nvidia-smi topo -p2p``."""


class Gpu(NamedTuple):
    """One GPU.

    Attributes:
        number: on this machine.
        memory, free: bytes; 0 where the driver does not say.
        capability: major and minor number of its compute capability; zeros where not said.
    """

    number: int
    uuid: str
    name: str
    driver: str
    memory: int
    free: int
    compute_mode: str
    capability: tuple[int, int]


class PeerAccess(NamedTuple):
    """Which GPUs can address the memory of which others.

    Attributes:
        status: the driver's word for each ordered pair of numbers; pairs that it does not name are
            taken for unknown.
    """

    status: Mapping[tuple[int, int], str]

    def reaches(self, first: int, second: int) -> bool:
        """Whether a process on GPU ``first`` can address the memory of GPU ``second``."""
        return first == second or self.status.get((first, second)) == _REACHED

    def why_not(self, first: int, second: int) -> str:
        """The driver's reason against :meth:`reaches`."""
        return _WHY_NOT.get(self.status.get((first, second), "U"), _WHY_NOT["U"])


def read_gpus() -> list[Gpu]:
    """All GPUs of this machine, by number. Raises DriverError."""
    program = find_program(QUERY)
    try:
        return _query(program, (*_FIELDS, _CAPABILITY, _NAME))
    except DriverError as error:
        if _CAPABILITY not in str(error):
            raise
    return _query(program, (*_FIELDS, _NAME))  # a driver from before 2021


def _query(program: str, fields: Sequence[str]) -> list[Gpu]:
    answer = run_program(
        [program, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    )
    try:
        found = [_gpu(fields, line) for line in answer.splitlines() if line.strip()]
    except ValueError:
        raise DriverError(f"{QUERY} answers what is no list of GPUs: {answer[:80]!r}") from None
    return sorted(found)


def _gpu(fields: Sequence[str], line: str) -> Gpu:
    parts = [part.strip() for part in line.split(",", len(fields) - 1)]
    of = dict(zip(fields, parts, strict=True))
    return Gpu(
        number=int(of["index"]),
        uuid=of["uuid"],
        name=of[_NAME],
        driver=of["driver_version"],
        memory=_bytes(of["memory.total"]),
        free=_bytes(of["memory.free"]),
        compute_mode=of["compute_mode"],
        capability=_version(of.get(_CAPABILITY, "")),
    )


def _bytes(mebibytes: str) -> int:
    """``81559``; GPUs that share the system's memory answer ``[N/A]``."""
    return int(mebibytes) * _MIB if mebibytes.isdigit() else 0


def _version(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else (0, 0)


def visible_gpus(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> list[Gpu]:
    """Those that ``CUDA_VISIBLE_DEVICES`` leaves, in its order; all where it is not set.

    As CUDA does, the first entry that names no GPU hides itself and all behind it.
    """
    given = environ.get(VISIBLE)
    if given is None:
        return list(gpus)
    found: list[Gpu] = []
    for entry in given.split(","):
        gpu = _named(gpus, entry.strip())
        if gpu is None or gpu in found:
            break
        found.append(gpu)
    return found


def _named(gpus: Sequence[Gpu], entry: str) -> Gpu | None:
    """A number, or a UUID or the beginning of one."""
    by_uuid = entry.startswith("GPU-")
    for gpu in gpus:
        if gpu.uuid.startswith(entry) if by_uuid else entry == str(gpu.number):
            return gpu
    return None


def read_peer_access() -> PeerAccess:
    """Which GPUs reach each other. Raises DriverError."""
    return parse_peer_access(run_program([find_program(QUERY), "topo", "-p2p", "r"]))


def parse_peer_access(answer: str) -> PeerAccess:
    """The matrix that ``nvidia-smi topo -p2p r`` prints; DriverError if it prints none.

    A heading of the columns, perhaps underlined, then a line for each GPU, then a legend.
    """
    columns: list[int] = []
    status: dict[tuple[int, int], str] = {}
    for line in _ESCAPES.sub("", answer).splitlines():
        words = line.split()
        numbers = [int(found[1]) for word in words if (found := _GPU.fullmatch(word))]
        if not numbers:
            continue
        if not columns and len(numbers) == len(words):
            columns = numbers
        elif len(numbers) == 1 and _GPU.fullmatch(words[0]):
            for column, word in zip(columns, words[1:], strict=False):
                status[numbers[0], column] = word
    if not columns:
        raise DriverError(f"{QUERY} topo -p2p r answers no matrix: {answer[:80]!r}")
    return PeerAccess(status)
