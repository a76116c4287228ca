"""Which link carries suffixes between each two workers, and why. Pure; asks no driver.

What the driver knows comes as a :class:`LinkTopology`; what only a device can say (a handle that is
refused, host memory that cannot be registered) is found out when the links are opened, where
``auto`` steps down.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Final

from trserve.errors import ConfigError

AUTO: Final = "auto"
SHM: Final = "shm"
HOST_MAPPED: Final = "host_mapped"
CUDA_IPC: Final = "cuda_ipc"
NCCL: Final = "nccl"
TCP: Final = "tcp"

_AUTO_SHARE: Final = 8
_LARGEST_SHARE: Final = 2
"""``auto`` keeps rows resident up to an eighth of the free memory, ``host_mapped`` up to a half."""

_GIB: Final = 2**30


def missing_packages() -> dict[str, str]:
    """Why a link's packages cannot be used, by link; without importing any of them."""
    if find_spec("cupy") is None:
        why = "CuPy is not installed (pip install 'trserve[cuda]')"
        return {HOST_MAPPED: why, CUDA_IPC: why, NCCL: why}
    return {}


@dataclass(frozen=True)
class LinkTopology:
    """Where the workers are.

    Attributes:
        models: their names, for messages.
        gpus: the GPU of each worker (with tensor parallelism, of its rank 0), any name that is the
            same for all; empty for a worker on none.
        mps: the GPUs whose workers go through MPS.
        peers: ordered pairs of GPUs of which the first can address the second's memory.
        row_bytes: of all rows of the slab, which ``host_mapped`` keeps resident.
        free_bytes: host memory that is free; 0 if unknown.
        missing: see :func:`missing_packages`.
    """

    models: tuple[str, ...]
    gpus: tuple[str, ...]
    mps: frozenset[str] = frozenset()
    peers: frozenset[tuple[str, str]] = frozenset()
    row_bytes: int = 0
    free_bytes: int = 0
    missing: Mapping[str, str] = field(default_factory=missing_packages)

    def pairs(self) -> list[tuple[int, int]]:
        """Each two workers once."""
        count = len(self.models)
        return [(a, b) for a in range(count) for b in range(a + 1, count)]


@dataclass(frozen=True)
class LinkChoice:
    """What was chosen.

    Attributes:
        names: the link from each worker (outer) to each (inner); "" to itself.
        reasons: one line a pair, as ``trserve doctor`` prints them.
        wanted: what was asked for.
    """

    names: list[list[str]]
    reasons: list[str]
    wanted: str


def choose_link(topology: LinkTopology, wanted: str = AUTO) -> LinkChoice:
    """The link of every pair. ConfigError for one that was asked for and cannot be had."""
    count = len(topology.models)
    names = [["" if a == b else SHM for b in range(count)] for a in range(count)]
    reasons = []
    for a, b in topology.pairs():
        name, why = _choose(topology, a, b) if wanted == AUTO else _insist(topology, a, b, wanted)
        names[a][b] = names[b][a] = name
        reasons.append(f"{topology.models[a]} - {topology.models[b]}: {name} ({why})")
    return LinkChoice(names, reasons, wanted)


def _choose(topology: LinkTopology, a: int, b: int) -> tuple[str, str]:
    if why := _why_no_device(topology, a, b):
        return SHM, why
    if why := topology.missing.get(CUDA_IPC, ""):
        return SHM, why
    against, for_it = _cuda_ipc(topology, a, b)
    if not against and for_it:
        return CUDA_IPC, for_it
    against = against or "one GPU without MPS: models on it take turns"
    if why := _why_not_mapped(topology, _AUTO_SHARE):
        return SHM, f"{against}; {why}"
    return HOST_MAPPED, against


def _insist(topology: LinkTopology, a: int, b: int, wanted: str) -> tuple[str, str]:
    against = _why_not(topology, a, b, wanted)
    if against:
        raise ConfigError(
            f"--link {wanted} cannot join {topology.models[a]} and {topology.models[b]}: {against}"
            "\nleave --link out, and the fastest link that there is will be taken"
        )
    return wanted, "as --link says"


def _why_not(topology: LinkTopology, a: int, b: int, wanted: str) -> str:
    if wanted == SHM:
        return ""
    if wanted == TCP:
        return "they are on one host (models at others are given as NAME@HOST:PORT)"
    if why := _why_no_device(topology, a, b):
        return why
    if why := topology.missing.get(wanted, ""):
        return why
    if wanted == HOST_MAPPED:
        return _why_not_mapped(topology, _LARGEST_SHARE)
    if wanted == CUDA_IPC:
        return _cuda_ipc(topology, a, b)[0]
    if topology.gpus[a] == topology.gpus[b]:
        return "both are on one GPU, where NCCL refuses to join two processes"
    return ""


def _why_no_device(topology: LinkTopology, a: int, b: int) -> str:
    off = [topology.models[w] for w in (a, b) if not topology.gpus[w]]
    if not off:
        return ""
    return f"{' and '.join(off)} {'is' if len(off) == 1 else 'are'} on no GPU"


def _cuda_ipc(topology: LinkTopology, a: int, b: int) -> tuple[str, str]:
    """Why it cannot be, and why it should be; neither on one GPU without MPS."""
    first, second = topology.gpus[a], topology.gpus[b]
    if first == second:
        return "", "one GPU under MPS" if first in topology.mps else ""
    if {(first, second), (second, first)} <= topology.peers:
        return "", "GPUs that reach each other's memory"
    return "these GPUs cannot reach each other's memory", ""


def _why_not_mapped(topology: LinkTopology, share: int) -> str:
    if why := topology.missing.get(HOST_MAPPED, ""):
        return why
    if topology.free_bytes and topology.row_bytes * share > topology.free_bytes:
        return (
            f"host_mapped would keep all rows resident, {topology.row_bytes / _GIB:.1f} GiB, "
            f"more than 1/{share} of the memory that is free"
        )
    return ""
