"""The solver by single events, with processes that are none: started, replaced, given up, told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.stack import new_plan
from tests.launcher.test_workforce import NoProcess
from trserve.children import Child
from trserve.errors import StartFailedError
from trserve.ipc.child import ChildArguments
from trserve.ipc.control import GATEWAY_IDENTITY, SOLVER_IDENTITY, Message, worker_identity
from trserve.solving import PATIENCE, Solving

ROWS = {"4": [1, 3], "8": [1, 5]}


@dataclass
class Scene:
    """A server's children, and what they were told."""

    children: list[Child]
    started: list[Child] = field(default_factory=list)
    sent: list[tuple[str, Message]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    heartbeat: int = 0
    solving: Solving = field(init=False)

    def send(self, identity: str, message: Message) -> None:
        self.sent.append((identity, message))

    def watch(self, child: Child) -> None:
        self.started.append(child)
        self.children.append(child)

    def die(self, now: float, failure: str | None = None) -> None:
        child = self.children.pop()
        assert child.identity == SOLVER_IDENTITY
        child.failure = (failure, 3) if failure else None
        self.solving.replace(child, now)

    def tick(self, now: float) -> None:
        self.solving.tick(now, self.heartbeat)

    def told(self, kind: str) -> list[tuple[str, Any]]:
        return [(to, message.get("rows")) for to, message in self.sent if message["type"] == kind]


NewScene = Callable[..., Scene]
BOTH = [worker_identity(0), worker_identity(1)]


@pytest.fixture
def new_scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NewScene:
    def start(identity: str, title: str, module: str, *_: Any) -> Child:
        assert module == "trserve.solver.main"
        return Child(identity, title, NoProcess(), -1)

    monkeypatch.setattr(Child, "start", start)

    def make(**changes: Any) -> Scene:
        names = [GATEWAY_IDENTITY, *BOTH]
        scene = Scene([Child(name, name, NoProcess(), -1, ready=True) for name in names])
        scene.solving = Solving(
            new_plan(tmp_path, router="none", **changes),
            scene.children,
            scene,  # type: ignore[arg-type]
            lambda index: ChildArguments(0, 0, "", 0, (), index),
            scene.watch,
            scene.notes.append,
        )
        return scene

    return make


@pytest.fixture
def scene(new_scene: NewScene) -> Scene:
    scene = new_scene()
    scene.solving.start()
    return scene


def test_it_is_started_only_where_thresholds_follow_the_load(new_scene: NewScene) -> None:
    for thresholds, count in ((None, 1), ([1, 3], 0)):
        scene = new_scene(batch_threshold=thresholds)
        scene.solving.start()
        assert len(scene.started) == count


def test_thresholds_reach_the_workers_and_nobody_else(scene: Scene) -> None:
    scene.solving.on_thresholds({"type": "thresholds", "rows": ROWS})
    assert scene.told("thresholds") == [(worker, ROWS) for worker in BOTH]
    assert all(message["models"] == 2 for _, message in scene.sent)


def test_a_worker_that_is_not_ready_is_told_once_it_is(scene: Scene) -> None:
    scene.children[2].ready = False
    scene.solving.on_ready(scene.children[1])
    assert scene.sent == []
    scene.solving.on_thresholds({"type": "thresholds", "rows": {"4": [1, 2]}})
    scene.solving.on_thresholds({"type": "thresholds", "rows": ROWS})
    assert [to for to, _ in scene.sent] == [BOTH[0]] * 2
    scene.solving.on_ready(scene.children[2])
    assert scene.told("thresholds")[2:] == [(BOTH[1], ROWS)]


def test_a_worker_that_starts_knows_before_its_first_step_what_the_others_do(scene: Scene) -> None:
    scene.solving.on_thresholds({"type": "thresholds", "rows": ROWS})
    scene.children[2].ready = False
    scene.sent.clear()
    scene.solving.on_hello(scene.children[2])
    assert scene.told("thresholds") == [(BOTH[1], ROWS)]


def test_the_solver_knows_whether_its_thresholds_are_in_force(scene: Scene) -> None:
    def told() -> list[bool]:
        return [message["held"] for _, message in scene.sent if message["type"] == "held"]

    scene.solving.on_routing({"type": "routing", "number": 1, "rows": ROWS})
    assert told() == [True]
    (solver,) = [child for child in scene.children if child.identity == SOLVER_IDENTITY]
    scene.solving.on_hello(solver)
    assert told() == [True, True], "another one has to know as well"
    scene.solving.on_routing({"type": "routing", "number": 2, "rows": None})
    assert told() == [True, True, False]


def test_a_drain_opens_the_gates_and_those_of_a_worker_that_comes_back(scene: Scene) -> None:
    scene.solving.drain()
    scene.solving.on_ready(scene.children[2])
    assert [to for to, _ in scene.told("drain")] == [*BOTH, BOTH[1]]


def test_one_that_dies_is_started_again_after_pauses_that_grow(scene: Scene) -> None:
    scene.solving.on_thresholds({"type": "thresholds", "rows": ROWS})
    scene.die(10.0)
    assert list(scene.solving.due()) == [11.0]
    scene.tick(10.9)
    assert len(scene.started) == 1
    scene.tick(11.0)
    assert len(scene.started) == 2
    assert list(scene.solving.due()) == []
    scene.die(12.0, "no memory")
    assert list(scene.solving.due()) == [14.0]
    assert len(scene.notes) == 2
    assert "SIGKILL" in scene.notes[0] and "no memory" in scene.notes[1]
    assert len(scene.told("thresholds")) == 2, "those in force stay"


def test_the_third_death_within_a_minute_is_the_last(scene: Scene) -> None:
    scene.solving.on_thresholds({"type": "thresholds", "rows": ROWS})
    for now in (0.0, 20.0):
        scene.die(now)
        scene.tick(now + 10.0)
    scene.die(59.0)
    assert list(scene.solving.due()) == []
    scene.tick(1000.0)
    scene.solving.start()
    assert len(scene.started) == 3
    assert scene.told("thresholds")[2:] == [(worker, {}) for worker in BOTH]
    assert "third time" in scene.notes[-1] and "--batch-threshold" in scene.notes[-1]


def test_deaths_that_lie_far_apart_do_not_add_up(scene: Scene) -> None:
    for now in range(0, 400, 40):
        scene.die(float(now))
        scene.tick(now + 10.0)
    assert len(scene.started) == 11


def test_one_that_hangs_is_killed_once_and_started_again(new_scene: NewScene) -> None:
    scene = new_scene(watchdog_s=10.0 / PATIENCE)
    scene.solving.start()
    scene.solving.on_thresholds({"type": "thresholds", "rows": ROWS})
    for now in range(30):
        scene.heartbeat += 1
        scene.tick(float(now))
    (solver,) = scene.started
    for now in range(30, 39):
        scene.tick(float(now))
    assert not solver.process.kills
    for now in range(39, 45):
        scene.tick(float(now))
    assert solver.process.kills == 1
    assert solver.failure and "hung for 10 s and was killed" in solver.failure[0]
    scene.children.remove(solver)
    scene.solving.replace(solver, 45.0)
    scene.tick(46.0)
    assert len(scene.started) == 2 and "it is started again" in scene.notes[-1]
    assert len(scene.told("thresholds")) == 2, "those in force stay"


def test_hanging_again_and_again_is_the_end_however_long_the_watchdog_waits(
    new_scene: NewScene,
) -> None:
    scene = new_scene(watchdog_s=100.0 / PATIENCE)
    scene.solving.start()
    for now in range(400):
        scene.tick(float(now))
        last = scene.started[-1]
        if last.process.kills and last in scene.children:
            scene.children.remove(last)
            scene.solving.replace(last, float(now))
    assert len(scene.started) == 3 and "third time" in scene.notes[-1]


def test_without_a_watchdog_nobody_hangs(scene: Scene) -> None:
    for now in range(400):
        scene.tick(float(now))
    assert len(scene.started) == 1 and not scene.started[0].process.kills


def ask(scene: Scene, **change: Any) -> Message:
    """What the gateway is answered, once those who are asked have confirmed a change."""
    scene.solving.on_message({"type": "routing", "number": 7, **change})
    asked = [to for to, message in scene.sent if message["type"] == "confirm"]
    assert asked == (BOTH if change else [])
    for model in range(len(asked)):
        assert scene.sent[-1][1]["type"] != "routing"
        scene.solving.on_message({"type": "confirmed", "number": 6, "model": model})
        scene.solving.on_message({"type": "confirmed", "number": 7, "model": model})
    scene.sent = [each for each in scene.sent if each[1]["type"] != "confirm"]
    to, answer = scene.sent.pop()
    assert (to, answer["type"], answer["number"]) == (GATEWAY_IDENTITY, "routing", 7)
    return answer


def test_thresholds_that_the_admin_holds_stay_until_they_are_let_go(scene: Scene) -> None:
    held = {"2": [1, 2]}
    scene.solving.on_message({"type": "thresholds", "rows": {"4": [1, 2]}})
    answer = ask(scene, rows=held)
    assert (answer["rows"], answer["held"]) == (held, True)
    assert scene.told("thresholds")[2:] == [(worker, held) for worker in BOTH]
    scene.solving.on_message({"type": "thresholds", "rows": ROWS})
    assert len(scene.told("thresholds")) == 4, "the solver's wait"
    scene.solving.on_ready(scene.children[2])
    assert scene.told("thresholds")[4:] == [(BOTH[1], held)]
    answer = ask(scene, rows=None)
    assert (answer["rows"], answer["held"]) == (ROWS, False)
    assert scene.told("thresholds")[5:] == [(worker, ROWS) for worker in BOTH]


def test_fixed_thresholds_come_back_when_the_admin_lets_go(new_scene: NewScene) -> None:
    scene = new_scene(batch_threshold=[1, 2])
    start = ask(scene)["rows"]
    assert start == {"1": [1, 1], "2": [1, 2]} and scene.sent == []
    ask(scene, rows={"3": [1, 3]})
    assert ask(scene, rows=None)["rows"] == start
    assert scene.told("thresholds")[-1] == (BOTH[1], start)


def test_router_parameters_add_up_and_reach_a_worker_that_comes_back(scene: Scene) -> None:
    assert ask(scene)["router"] == {}
    ask(scene, router={"tau": 0.5})
    assert ask(scene, router={"p": 1.0})["router"] == {"tau": 0.5, "p": 1.0}
    scene.solving.on_ready(scene.children[2])
    told = [(to, m["values"]) for to, m in scene.sent if m["type"] == "router_config"]
    assert told[-1] == (BOTH[1], {"tau": 0.5, "p": 1.0})
    assert [to for to, _ in told] == [*BOTH, *BOTH, BOTH[1]]


def test_starts_that_are_refused_are_said_and_not_tried_for_ever(
    new_scene: NewScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = new_scene()

    def refuse(*_: object) -> Child:
        raise StartFailedError("no room")

    monkeypatch.setattr(Child, "start", refuse)
    scene.solving.start()
    for _ in range(2):
        (due,) = scene.solving.due()
        scene.tick(due)
    assert list(scene.solving.due()) == [] and scene.started == []
    assert len(scene.notes) == 3 and all(note.startswith("no room") for note in scene.notes)


def test_a_worker_that_dies_before_it_confirms_is_waited_for_until_another_is_ready(
    scene: Scene,
) -> None:
    scene.solving.on_message({"type": "routing", "number": 1, "router": {"tau": 0.5}})
    scene.solving.on_message({"type": "confirmed", "number": 1, "model": 0})
    assert "routing" not in [message["type"] for _, message in scene.sent]
    scene.solving.on_ready(scene.children[2])
    assert scene.sent[-1][1]["type"] == "routing"
