"""What this process, its container and its user may take: files, address space, memory, a port.

Changes nothing but a socket and a memory file, both closed at once. Knows a plan's sizes, not how
they came about.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Final, NamedTuple

from trserve.config import LaunchConfig
from trserve.control_groups import memory_left
from trserve.doctor.findings import Finding, Level
from trserve.errors import StartupError
from trserve.front import listen
from trserve.ipc.layout import Layout
from trserve.ipc.slab import create_slab_file

OWN_FILES: Final = 64
"""Descriptors of a gateway beside its connections, with room."""

_SHM: Final = Path("/dev/shm")
_NCCL_SHM: Final = 2**30
_ADDRESSES: Final = 3 * 2**29
"""Address space that a worker maps beside weights and KV, for torch, threads and allocators: 1.2
GiB with the embedded pair (VmPeak in /proc), and room."""

_GIB: Final = 2**30


class Needs(NamedTuple):
    """Bytes that a server takes.

    Attributes:
        resident: of all processes from the start: weights, slab, and the programs themselves.
        kv: of all models' KV caches, which fill as requests come.
        largest: of the one process that takes most, weights and KV.
    """

    resident: int
    kv: int
    largest: int


def check_files(config: LaunchConfig) -> Finding:
    """Open files: a connection each; the gateway raises the soft limit to the hard one itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    running = config.engine.max_requests
    least = running + OWN_FILES
    wanted = least + config.endpoint.max_queue
    if hard == resource.RLIM_INFINITY or hard >= wanted:
        return Finding("open files", Level.OK, f"{_limit(hard)} at most, {wanted} are enough")
    what = f"the hard limit is {hard} open files (soft: {_limit(soft)})"
    fix = f"ulimit -Hn {wanted} (systemd: LimitNOFILE=, containers: --ulimit nofile=)"
    if hard < least:
        what += f"; {running} requests at once (--max-requests) need {least}"
        fix += f", or --max-requests {max(1, hard - OWN_FILES)}"
        return Finding("open files", Level.FAULT, what, "RLIMIT_NOFILE", fix)
    what += f"; with those that wait (--max-queue), {wanted} connections may be open"
    return Finding("open files", Level.WARNING, what, "RLIMIT_NOFILE", fix)


def _limit(value: int) -> str:
    return "no limit" if value == resource.RLIM_INFINITY else str(value)


def check_port(host: str, port: int) -> Finding:
    """Whether the address can be listened on, by listening on it."""
    try:
        listen(host, port).close()
    except StartupError as error:
        fix = "give another --port or --host; `ss -ltnp` tells who listens"
        return Finding("port", Level.FAULT, str(error).partition(";")[0], "--port", fix)
    shown = f"{host}:{port} is free" if port else f"{host} gives a free one"
    return Finding("port", Level.OK, shown)


def check_slab(layout: Layout) -> Finding:
    """Whether the shared memory of all processes can be made, by making it."""
    size = f"{layout.size / 2**20:.1f} MiB"
    try:
        os.close(create_slab_file(layout))
    except StartupError as error:
        refused = "--max-requests, --max-model-len, RLIMIT_FSIZE"
        fix = "lower --max-requests or --max-model-len"
        return Finding.of_error("shared memory", error, refused, fix)
    return Finding("shared memory", Level.OK, f"a memory file of {size} can be made")


def check_shm(gpus: int) -> Finding:
    """``/dev/shm``, which only NCCL between several GPUs needs: the slab is a file of memory."""
    found = os.statvfs(_SHM) if _SHM.is_dir() else None
    size = found.f_blocks * found.f_frsize if found else 0
    shown = f"{_SHM} has {size / 2**20:.0f} MiB"
    if gpus < 2 or size >= _NCCL_SHM:
        return Finding("/dev/shm", Level.OK, f"{shown}; the slab does not lie there")
    what = f"{shown}; NCCL between {gpus} GPUs wants {_NCCL_SHM >> 20}"
    fix = "remount it larger (containers: --shm-size 1g)"
    return Finding("/dev/shm", Level.WARNING, what, "--shm-size", fix, unproven=True)


def check_address_space(needs: Needs) -> Finding:
    """``ulimit -v``, which holds for each process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    wanted = needs.largest + _ADDRESSES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        unlimited = soft == resource.RLIM_INFINITY
        shown = "no limit" if unlimited else f"{soft / _GIB:.1f} GiB a process"
        return Finding("address space", Level.OK, shown)
    return Finding(
        "address space",
        Level.FAULT,
        f"a process may map {soft / _GIB:.1f} GiB; a worker maps {wanted / _GIB:.1f}",
        "RLIMIT_AS",
        "ulimit -v unlimited (systemd: LimitAS=infinity)",
    )


def check_memory_limit(needs: Needs) -> Finding:
    """The memory limits of the control groups that this process is in."""
    left = memory_left()
    if left is None:
        return Finding("memory limit", Level.OK, "no control group sets one")
    most = needs.resident + needs.kv
    shown = f"the control group leaves {left / _GIB:.2f} GiB"
    if left >= most:
        return Finding("memory limit", Level.OK, f"{shown}; {most / _GIB:.2f} are needed at most")
    wanted = f"{most / _GIB:.1f} GiB"
    raise_it = f"raise it to {wanted} (systemd: MemoryMax=, containers: --memory)"
    if left < needs.resident:
        what = f"{shown}, but weights and processes need {needs.resident / _GIB:.2f}"
        fix = f"{raise_it}, or name smaller --models"
        return Finding("memory limit", Level.FAULT, what, "memory.max", fix)
    what = f"{shown}; with the KV caches full, {most / _GIB:.2f} are needed"
    lower = f"--memory {max(1, (left - needs.resident) >> 20)}m"
    return Finding("memory limit", Level.WARNING, what, "memory.max", f"{raise_it}, or {lower}")
