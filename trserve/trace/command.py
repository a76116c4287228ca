"""What ``trserve trace`` does: attach, collect for a while, write the file, say what is in it."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Final

import orjson

from trserve.errors import ConfigError, StartupError
from trserve.ipc.trace import Event, EventKind, TraceReader
from trserve.trace.attach import Attached, attach
from trserve.trace.timeline import timeline
from trserve.waiting import wait_readable

_EVERY_S: Final = 0.05
"""Often enough that a ring of 32,768 events is not full before it is read."""


def trace(output: Path, *, seconds: float, pid: int | None, port: int | None) -> str:
    """Write what the server does in the next ``seconds``; returns a line about it.

    Ctrl-C ends it early. Raises StartupError without a server or a place to write to.
    """
    server = attach(pid, port)
    readers = {name: TraceReader(words) for name, words in _rings(server).items()}
    try:
        file = output.open("wb")
    except OSError as error:
        raise ConfigError(f"-o {output}: {error.strerror}") from None
    with file:
        events, collected_s = _collect(readers, server.pid, seconds)
        lost = {name: reader.lost for name, reader in readers.items() if reader.lost}
        file.write(orjson.dumps(timeline(events, pid=server.pid, lost=lost)))
    return _summary(output, events, collected_s, sum(lost.values()))


def _rings(server: Attached) -> dict[str, memoryview]:
    workers = range(server.layout.workers)
    names = {f"worker {index}": index for index in workers} | {"gateway": server.layout.gateway}
    return {name: server.trace_words(process) for name, process in names.items()}


def _collect(
    readers: dict[str, TraceReader], pid: int, seconds: float
) -> tuple[dict[str, list[Event]], float]:
    """The events of ``seconds``, or of less if the server or the user ends it; and how long."""
    events: dict[str, list[Event]] = {name: [] for name in readers}
    since_ns = time.monotonic_ns()
    # After Ctrl-C, what there is by then is wanted.
    with contextlib.suppress(KeyboardInterrupt):
        _watch(readers, events, pid, seconds)
    until_ns = time.monotonic_ns()
    _read(readers, events)
    # One window for all: the rings are read one after the other, and an arrow needs both ends.
    clipped = {
        name: [event for event in found if since_ns <= event.time_ns <= until_ns]
        for name, found in events.items()
    }
    shown = {name: found for name, found in clipped.items() if found or name != "gateway"}
    return shown, (until_ns - since_ns) / 1e9


def _watch(
    readers: dict[str, TraceReader], events: dict[str, list[Event]], pid: int, seconds: float
) -> None:
    try:
        ended = os.pidfd_open(pid)
    except ProcessLookupError:
        raise StartupError(f"process {pid} has just ended") from None
    until = time.monotonic() + seconds
    try:
        while (left := until - time.monotonic()) > 0:
            if wait_readable(ended, min(_EVERY_S, left)):
                return
            _read(readers, events)
    finally:
        os.close(ended)


def _read(readers: dict[str, TraceReader], events: dict[str, list[Event]]) -> None:
    for name, reader in readers.items():
        events[name] += reader.read()


def _summary(output: Path, events: dict[str, list[Event]], seconds: float, lost: int) -> str:
    kinds = [event.kind for found in events.values() for event in found]
    steps, handoffs = (kinds.count(kind) for kind in (EventKind.STEP, EventKind.HANDOFF_SENT))
    line = f"{output}: {steps} steps and {handoffs} handoffs in {seconds:.1f} s"
    if lost:
        line += f"; {lost} events were overwritten before they were read"
    return f"{line}; open it at https://ui.perfetto.dev"
