"""Events as the Trace Event Format has them: slices, arrows between tracks, and what is missing."""

from __future__ import annotations

import itertools
from typing import Any

import orjson

from trserve.ipc.baton import Finish
from trserve.ipc.trace import AnswerEnd, Event, EventKind, GateReason
from trserve.trace.timeline import timeline

START = 7_000_000_000


def event(at_us: float, kind: int, value: int = 0, *, slot: int = 0, gen: int = 0) -> Event:
    return Event(0, START + round(at_us * 1000), kind, gen, slot, value)


def step(begin_us: float, end_us: float, batch: int) -> Event:
    return event(end_us, EventKind.STEP, batch, gen=START + round(begin_us * 1000))


def entries(*tracks: list[Event]) -> list[dict[str, Any]]:
    events = {f"worker {track}": found for track, found in enumerate(tracks)}
    document = orjson.loads(orjson.dumps(timeline(events, pid=5, lost={})))
    found: list[dict[str, Any]] = document["traceEvents"]
    assert all(entry["pid"] == 5 and "ph" in entry and "tid" in entry for entry in found)
    return found


def of(phase: str, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [entry for entry in found if entry["ph"] == phase]


def test_a_step_is_a_slice_with_its_batch() -> None:
    found = entries([step(0, 30, 4), step(40, 75.5, 2)])
    steps = of("X", found)
    assert [(s["name"], s["ts"], s["dur"], s["args"]) for s in steps] == [
        ("step", 0, 30, {"batch": 4}),
        ("step", 40, 35.5, {"batch": 2}),
    ]


def test_tracks_are_named() -> None:
    named = [e["args"]["name"] for e in of("M", entries([], [])) if e["name"] == "thread_name"]
    assert named == ["worker 0", "worker 1"]


def test_a_handoff_is_an_arrow_into_the_step_that_resumes() -> None:
    request = {"slot": 3, "gen": 9}
    sender = [event(20, EventKind.HANDOFF_SENT, 6, **request), step(0, 30, 1)]
    receiver = [
        event(25, EventKind.HANDOFF_RECEIVED, 6, **request),
        event(31, EventKind.RESUMED, 6, **request),
        step(28, 60, 1),
    ]
    found = entries(sender, receiver)
    arrow = [e for e in found if e["ph"] in "stf"]
    assert [(e["ph"], e["tid"], e["ts"]) for e in arrow] == [
        ("s", 0, 20),
        ("t", 1, 25),
        ("f", 1, 31),
    ]
    assert {e["id"] for e in arrow} == {"3.9.6"}
    assert arrow[-1]["bp"] == "e"
    for end in arrow:  # an arrow's end that no slice holds is not drawn
        assert any(
            s["tid"] == end["tid"] and s["ts"] <= end["ts"] <= s["ts"] + s["dur"]
            for s in of("X", found)
        )


def test_arrows_of_different_hops_and_requests_are_apart() -> None:
    keys = [(1, 4, 1), (1, 4, 2), (1, 5, 1), (2, 4, 1)]
    tracks: tuple[list[Event], list[Event]] = ([], [])
    for at, (slot, gen, hop) in enumerate(keys):
        tracks[0].append(event(10 * at, EventKind.HANDOFF_SENT, hop, slot=slot, gen=gen))
        tracks[1].append(event(10 * at + 5, EventKind.HANDOFF_RECEIVED, hop, slot=slot, gen=gen))
    found = entries(*tracks)
    assert len({e["id"] for e in of("s", found)}) == len(keys)
    assert len(of("f", found)) == len(keys)


def test_an_arrow_without_its_other_end_is_left_out() -> None:
    found = entries([event(1, EventKind.HANDOFF_SENT, 1, gen=1)], [])
    assert not [e for e in found if e["ph"] in "stf"]


def test_gates_and_lives_are_points() -> None:
    found = entries(
        [
            event(1, EventKind.ADMITTED, 12, slot=1, gen=2),
            event(2, EventKind.GATE_OPENED, GateReason.TIMEOUT),
            event(3, EventKind.FINISHED, Finish.LENGTH, slot=1, gen=2),
            event(4, EventKind.GATE_OPENED, 99),
        ]
    )
    assert [(e["name"], e["args"]) for e in found if e["ph"] in "iX"] == [
        ("admitted", {"tokens": 12, "slot": 1, "gen": 2}),
        ("gate opened", {"why": "timeout"}),
        ("finished", {"why": "length", "slot": 1, "gen": 2}),
        ("gate opened", {"why": "99"}),
    ]


def test_arrows_join_the_gateway_to_who_takes_a_request_in_and_to_who_ends_it() -> None:
    request = {"slot": 1, "gen": 2}
    gateway = [
        event(1, EventKind.PUBLISHED, 12, **request),
        event(5, EventKind.FIRST_TOKEN, **request),
        event(9, EventKind.ANSWERED, AnswerEnd.CLIENT_LEFT, **request),
    ]
    first = [event(2, EventKind.ADMITTED, 12, **request)]
    second = [event(8, EventKind.FINISHED, Finish.STOP, **request)]
    found = entries(first, second, gateway)
    arrows = [(e["ph"], e["id"], e["tid"], e["ts"]) for e in found if e["ph"] in "stf"]
    assert sorted(arrows, key=lambda arrow: arrow[3]) == [
        ("s", "1.2.in", 2, 0),
        ("f", "1.2.in", 0, 1),
        ("s", "1.2.out", 1, 7),
        ("f", "1.2.out", 2, 8),
    ]
    own = [(e["name"], e["args"]) for e in of("X", found) if e["tid"] == 2]
    assert own == [
        ("published", {"tokens": 12, **request}),
        ("first token", request),
        ("answered", {"why": "client_left", **request}),
    ]


def test_a_kind_that_is_not_known_is_skipped() -> None:
    assert [e["ph"] for e in entries([event(1, 63, 1)])] == ["M", "M"]


def test_times_are_in_order_and_from_the_first_event() -> None:
    found = entries([step(5, 9, 1)], [event(2, EventKind.ADMITTED, gen=1)])
    times = sorted(e["ts"] for e in found if "ts" in e)
    assert times[0] == 0
    assert all(a <= b for a, b in itertools.pairwise(times))
    assert times[-1] == 3


def test_what_was_lost_is_said() -> None:
    assert timeline({"worker 0": []}, pid=1, lost={"worker 0": 8})["otherData"] == {
        "lost_events": {"worker 0": 8}
    }
