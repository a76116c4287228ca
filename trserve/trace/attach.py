"""Finds a running server of this user and opens its events for reading. Writes nothing to it.

The slab's memory file has no name, but whoever may look at the launcher's descriptors may open it
through ``/proc``; that is the same user, and root. Knows no events.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trserve.errors import ConfigError, StartupError
from trserve.ipc.instance import running_instances
from trserve.ipc.layout import HEADER_WORDS, Layout
from trserve.ipc.slab import SLAB_NAME

_LISTENING: Final = "0A"


@dataclass(frozen=True)
class Attached:
    """A server's slab, mapped read-only; ``pid`` is the launcher's, or the one that was named."""

    pid: int
    layout: Layout
    memory: memoryview

    def trace_words(self, process: int) -> memoryview:
        """The int64 words of one process's events, a worker's or the gateway's."""
        offset = self.layout.trace_offset(process)
        return self.memory[offset : offset + self.layout.trace_bytes].cast("q")


def attach(pid: int | None, port: int | None) -> Attached:
    """The one server that runs, or the one that is named.

    Raises:
        ConfigError: several servers run and none is named.
        StartupError: there is none, or none like this.
    """
    if pid is not None and port is not None:
        raise ConfigError("--pid and --port both name a server: give one of them")
    return _open(_choose(port) if pid is None else pid)


def _choose(port: int | None) -> int:
    pids = sorted(running_instances())
    if port is not None:
        found = [pid for pid in pids if port in _listening_ports(pid)]
        if not found:
            raise StartupError(
                f"--port {port}: no server of this user listens there; running launchers: "
                f"{', '.join(map(str, pids)) or 'none'}"
            )
        return found[0]
    if not pids:
        raise StartupError(
            "no server of this user runs (with this TMPDIR): start one with `trserve launch`, "
            "or name its launcher with --pid"
        )
    if len(pids) > 1:
        raise ConfigError(
            f"several servers run, with launchers {', '.join(map(str, pids))}: "
            "choose one with --pid or --port"
        )
    return pids[0]


def _open(pid: int) -> Attached:
    for link, target in _descriptors(pid):
        if target.startswith(f"/memfd:{SLAB_NAME}"):
            with open(link, "rb") as file:
                memory = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            layout = Layout.from_header(memory[: 8 * HEADER_WORDS].cast("q"))
            if layout is None or layout.size != len(memory):
                raise StartupError(f"process {pid} runs another version of trserve")
            return Attached(pid, layout, memory)
    raise StartupError(f"--pid {pid}: this process holds no slab of a trserve server")


def _descriptors(pid: int) -> Iterator[tuple[Path, str]]:
    """The open files of a process: the link below /proc, and what it names."""
    try:
        links = list(Path(f"/proc/{pid}/fd").iterdir())
    except FileNotFoundError:
        raise StartupError(f"--pid {pid}: there is no such process") from None
    except PermissionError:
        raise StartupError(f"--pid {pid}: this process is another user's") from None
    for link in links:
        try:
            yield link, os.readlink(link)
        except FileNotFoundError:
            continue  # closed meanwhile


def _listening_ports(pid: int) -> set[int]:
    """The TCP ports of the sockets on which a process listens."""
    inodes = {target for _, target in _descriptors(pid) if target.startswith("socket:")}
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENING and f"socket:[{fields[9]}]" in inodes:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports
