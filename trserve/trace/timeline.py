"""Events as a document in the Trace Event Format, which Perfetto and chrome://tracing open.

One track a process of the server. Steps are slices with their batch size, handoffs are arrows from
the worker that sent to the step in which the request goes on, keyed by slot, generation and hop.
Two more arrows a request join the gateway's track to the workers': from where it was given a slot
to the worker that took it in, and from the worker that ended it to the end of the client's answer.
Pure; knows no shared memory and no server.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any, Final

from trserve.ipc.baton import Finish
from trserve.ipc.trace import AnswerEnd, Event, EventKind, GateReason

Entry = dict[str, Any]
Anchor = tuple[int, float]
"""A track, and a time on it in microseconds."""

_HANDOFF: Final = {
    EventKind.HANDOFF_SENT: "send",
    EventKind.HANDOFF_RECEIVED: "receive",
    EventKind.RESUMED: "resume",
}
_LIFE: Final = {
    EventKind.PUBLISHED: ("published", "tokens", "in"),
    EventKind.ADMITTED: ("admitted", "tokens", "in"),
    EventKind.FIRST_TOKEN: ("first token", None, None),
    EventKind.FINISHED: ("finished", Finish, "out"),
    EventKind.ANSWERED: ("answered", AnswerEnd, "out"),
}
"""Name; what the value is (tokens, or a kind of end); which arrow begins or ends there."""

_POINT_US: Final = 0.5
"""Length of the slices that hold an arrow's ends: arrows bind to slices, not to points."""


def timeline(
    events: Mapping[str, Sequence[Event]], *, pid: int, lost: Mapping[str, int]
) -> dict[str, Any]:
    """The document.

    Args:
        events: of each process by its name, oldest first; the tracks are in this order.
        pid: what the server's process is called.
        lost: how many events of each process were overwritten before they were read.
    """
    start = min(map(_begin, (event for found in events.values() for event in found)), default=0)
    entries = [_named("process_name", pid, 0, f"trserve {pid}")]
    arrows: dict[str, list[Anchor]] = defaultdict(list)
    for track, (name, found) in enumerate(events.items()):
        entries.append(_named("thread_name", pid, track, name))
        entries += _steps(track, found, start)
        entries += _points(track, found, start, arrows)
    entries += _arrows(arrows)
    for entry in entries:
        entry["pid"] = pid
    return {
        "traceEvents": entries,
        "displayTimeUnit": "ns",
        "otherData": {"lost_events": dict(lost)},
    }


def _named(what: str, pid: int, track: int, name: str) -> Entry:
    return {"ph": "M", "name": what, "pid": pid, "tid": track, "args": {"name": name}}


def _begin(event: Event) -> int:
    return event.gen if event.kind == EventKind.STEP else event.time_ns


def _us(time_ns: int, start: int) -> float:
    return (time_ns - start) / 1000


def _steps(track: int, events: Iterable[Event], start: int) -> Iterator[Entry]:
    """A slice for each step; its ``gen`` is when it began."""
    for event in events:
        if event.kind == EventKind.STEP:
            yield {
                "ph": "X",
                "name": "step",
                "cat": "step",
                "tid": track,
                "ts": _us(event.gen, start),
                "dur": _us(event.time_ns, event.gen),
                "args": {"batch": event.value},
            }


def _points(
    track: int, events: Iterable[Event], start: int, arrows: dict[str, list[Anchor]]
) -> Iterator[Entry]:
    """Everything that happens at one moment; notes the ends of arrows in ``arrows``."""
    for event in events:
        at = _us(event.time_ns, start)
        where = {"tid": track, "ts": at}
        request = {"slot": event.slot, "gen": event.gen}
        if (name := _HANDOFF.get(event.kind)) is not None:  # type: ignore[call-overload]
            arrows[f"{event.slot}.{event.gen}.{event.value}"].append((track, at))
            slice_of = {"ph": "X", "name": name, "cat": "handoff", "dur": _POINT_US}
            yield {**slice_of, **where, "args": {**request, "hop": event.value}}
        elif event.kind in _LIFE:
            name, args, arrow = _life(event)
            if arrow is not None:
                arrows[f"{event.slot}.{event.gen}.{arrow}"].append((track, at))
            slice_of = {"ph": "X", "name": name, "cat": "request", "dur": _POINT_US}
            yield {**slice_of, **where, "args": {**args, **request}}
        elif event.kind == EventKind.GATE_OPENED:
            why = {"why": _name_in(GateReason, event.value)}
            point = {"ph": "i", "s": "t", "name": "gate opened", "cat": "gate"}
            yield {**point, **where, "args": why}


def _life(event: Event) -> tuple[str, Entry, str | None]:
    name, value, arrow = _LIFE[EventKind(event.kind)]
    if value is None:
        return name, {}, arrow
    if isinstance(value, str):
        return name, {value: event.value}, arrow
    return name, {"why": _name_in(value, event.value)}, arrow


def _name_in(kinds: type[IntEnum], value: int) -> str:
    return next((kind.name.lower() for kind in kinds if kind == value), str(value))


def _arrows(arrows: Mapping[str, Sequence[Anchor]]) -> Iterator[Entry]:
    for key, anchors in arrows.items():
        if len(anchors) < 2:
            continue  # the other end is outside of the window
        in_order = sorted(anchors, key=lambda anchor: anchor[1])
        last = len(in_order) - 1
        for at, (track, ts) in enumerate(in_order):
            phase = "s" if at == 0 else "f" if at == last else "t"
            name = "handoff" if key[-1].isdigit() else "request"
            arrow = {"ph": phase, "name": name, "cat": name, "id": key}
            bound = {"bp": "e"} if phase == "f" else {}
            yield {**arrow, **bound, "tid": track, "ts": ts}
