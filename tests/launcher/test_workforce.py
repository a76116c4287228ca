"""Workers by single events, with processes that are none: what is started, told and given up."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.gateway.stack import new_plan
from trserve.children import Child
from trserve.errors import StartFailedError
from trserve.ipc.baton import Baton, Finish, SlotState, unpack
from trserve.ipc.child import ChildArguments
from trserve.ipc.control import Message
from trserve.ipc.shared import Shared
from trserve.ipc.slab import Slab, WorkerStatus
from trserve.ipc.tally import TallyWriter
from trserve.worker_lives import REAPED_AFTER_S
from trserve.workforce import START_AGAIN_S, Workforce


class NoProcess:
    """Ends when it is killed, unless nobody can kill it."""

    def __init__(self) -> None:
        self.returncode = -9
        self.kills = 0

    def kill(self) -> None:
        self.kills += 1

    def poll(self) -> int | None:
        return None

    def wait(self, timeout: float | None = None) -> int:
        return self.returncode


@dataclass
class Scene:
    """A workforce, and all that it did."""

    shared: Shared
    slab: Slab
    started: list[Child] = field(default_factory=list)
    told: list[Message] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    force: Workforce = field(init=False)

    def status(self) -> list[WorkerStatus]:
        return [WorkerStatus(words.get("status")) for words in self.slab.workers]

    def process(self, at: int = -1) -> Any:
        return self.started[at].process

    def serve(self, child: Child | None = None, now: float = 0.0) -> None:
        child = child or self.started[-1]
        self.force.on_hello(child)
        self.force.on_ready(child, {}, now)

    def look(self, now: float) -> str | None:
        """A tick at which worker 0 is alive."""
        self.slab.workers[0].set("heartbeat", int(now) + 1)
        return self.force.tick(now)

    def kinds(self) -> list[tuple[str, int]]:
        return [(message["type"], message["model"]) for message in self.told]


NewScene = Callable[..., Scene]


@pytest.fixture
def new_scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NewScene]:
    """Makes one in which all workers are up."""
    monkeypatch.setattr(
        Child, "start", lambda identity, title, *_: Child(identity, title, NoProcess(), -1)
    )
    with ExitStack() as stack:

        def make(**changes: Any) -> Scene:
            plan = new_plan(tmp_path, router="none", **changes)
            shared = Shared.create(plan.layout)
            for fd in (shared.slab_fd, *shared.bells):
                stack.callback(os.close, fd)
            scene = Scene(shared, Slab(shared.slab_fd, plan.layout))
            scene.force = Workforce(
                plan,
                shared,
                arguments=lambda index: ChildArguments(0, 0, "", 0, shared.bells, index),
                watch=scene.started.append,
                tell=scene.told.append,
                note=scene.notes.append,
                directory=tmp_path,
            )
            scene.force.start()
            for child in tuple(scene.started):
                scene.serve(child)
            return scene

        yield make


@pytest.fixture
def scene(new_scene: NewScene) -> Scene:
    return new_scene(watchdog_s=5.0)


def test_the_first_start_is_no_news(scene: Scene) -> None:
    assert len(scene.started) == 2
    assert scene.status() == [WorkerStatus.UP] * 2
    assert scene.told == [] and scene.notes == []


@pytest.mark.parametrize("serves", [True, False])
def test_deaths_at_anothers_prompt_do_not_end_a_server_that_serves(
    new_scene: NewScene, serves: bool
) -> None:
    scene = new_scene(on_peer_loss="fail")
    slab, causes = scene.slab, []
    for gen in range(1, 7):
        slab.gen[0], slab.sent[0] = gen, 0b11
        slab.baton[0] = Baton(3, 0, SlotState.LIVE, Finish.NONE, 0, 0).pack()
        slab.in_step[1][:2] = 1, 0
        causes.append(scene.force.replace(scene.started[-1], float(gen)))
        assert slab.suspect[0] == gen
        if causes[-1] is None:
            scene.serve()
        if serves:
            TallyWriter(slab, 1).stayed(1, 1)
    assert [cause is None for cause in causes] == [True] * 5 + [serves]


def test_one_that_dies_is_started_again_and_the_gateway_is_told(scene: Scene) -> None:
    assert scene.force.replace(scene.started[1], 0.0) is None
    assert scene.started[2].identity == scene.started[1].identity
    assert scene.status() == [WorkerStatus.UP, WorkerStatus.RESTARTING]
    assert "SIGKILL" in scene.told[0]["message"]
    scene.serve()
    assert scene.status() == [WorkerStatus.UP] * 2
    assert scene.kinds() == [("worker_down", 1), ("worker_up", 1)]


def test_a_message_of_the_dead_is_not_its_successors(scene: Scene) -> None:
    scene.force.replace(scene.started[1], 0.0)
    scene.force.on_ready(scene.started[2], {}, 1.0)  # which has not even said hello
    assert not scene.started[2].ready
    assert scene.status()[1] is WorkerStatus.RESTARTING


def test_the_third_death_ends_the_server(scene: Scene) -> None:
    causes = []
    for at in range(3):
        causes.append(scene.force.replace(scene.started[-1], float(at)))
        if at < 2:
            scene.serve()
    assert causes[:2] == [None, None]
    assert causes[2] is not None and "worker 1" in causes[2] and "SIGKILL" in causes[2]
    assert len(scene.started) == 4, "nobody follows the third"


def test_degrade_gives_one_up_but_not_the_last(new_scene: NewScene) -> None:
    scene = new_scene(on_peer_loss="degrade")
    first = scene.started[0]
    for at in range(3):
        assert scene.force.replace(scene.started[-1], float(at)) is None
    assert scene.status() == [WorkerStatus.UP, WorkerStatus.LOST]
    assert scene.kinds()[-1] == ("worker_lost", 1)
    scene.force.tick(10.0)
    assert scene.force.replace(first, 11.0) is None
    assert scene.force.replace(scene.started[-1], 12.0) is None
    cause = scene.force.replace(scene.started[-1], 13.0)
    assert cause is not None and "worker 0" in cause


def test_waiting_starts_the_next_when_it_is_due(new_scene: NewScene) -> None:
    scene = new_scene(on_peer_loss="wait")
    for at in range(3):
        assert scene.force.replace(scene.started[-1], float(at)) is None
    assert len(scene.started) == 4
    assert list(scene.force.due()) == [3.0]
    scene.force.tick(2.9)
    assert len(scene.started) == 4
    scene.force.tick(3.0)
    assert len(scene.started) == 5
    assert list(scene.force.due()) == []


def test_one_that_hangs_is_killed_once_and_not_waited_for_for_ever(scene: Scene) -> None:
    now = 0.0
    while not scene.process(1).kills:
        assert scene.look(now) is None
        now += 1.0
    assert now - 1 == 5.0
    killed = now - 1
    while now < killed + REAPED_AFTER_S:
        assert scene.look(now) is None
        now += 1.0
    cause = scene.look(now)
    assert cause is not None and "does not end although it was killed" in cause
    assert scene.process(0).kills == 0
    assert scene.process(1).kills == 1


def test_one_that_hung_and_was_reaped_is_replaced(scene: Scene) -> None:
    for now in range(7):
        scene.look(float(now))
    assert scene.force.replace(scene.started[1], 7.0) is None
    assert "hung for 5 s" in scene.told[0]["message"]
    for now in range(8, 40):
        assert scene.look(float(now)) is None, "one that loads may take its time"
    assert scene.process().kills == 0


def refuse_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Child:
        raise StartFailedError("no room")

    monkeypatch.setattr(Child, "start", refuse)


def test_starts_that_are_refused_count_and_are_tried_again_after_a_pause(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as refusing:
        refuse_starts(refusing)
        assert scene.force.replace(scene.started[1], 0.0) is None
    assert scene.notes[1] == "no room; it is started again"
    assert list(scene.force.due()) == [START_AGAIN_S]
    assert scene.look(START_AGAIN_S) is None
    assert scene.started[2].identity == scene.started[1].identity
    refuse_starts(monkeypatch)
    cause = scene.force.replace(scene.started[2], 2.0)
    assert cause is not None and "too often" in cause


def test_a_worker_that_can_not_be_started_again_is_given_up(
    new_scene: NewScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = new_scene(on_peer_loss="degrade")
    refuse_starts(monkeypatch)
    assert scene.force.replace(scene.started[1], 0.0) is None
    assert scene.look(START_AGAIN_S) is None
    assert scene.status() == [WorkerStatus.UP, WorkerStatus.LOST]
    assert not list(scene.force.due())


def changed(path: Path, **of_second: Any) -> list[Any]:
    """The models of a plan, with a second one that is not as usual."""
    first, second = new_plan(path).models
    return [first, msgspec.structs.replace(second, **of_second)]


def test_what_is_left_of_a_group_of_ranks_is_not_ready(new_scene: NewScene, tmp_path: Path) -> None:
    scene = new_scene(models=changed(tmp_path, tp=2))
    assert scene.force.replace(scene.started[1], 0.0) is None
    assert scene.force.replace(scene.started[2], 0.0) is None
    told, (first, second) = len(scene.told), scene.started[-2:]
    scene.force.on_hello(first)
    assert scene.force.replace(first, 1.0) is None  # as soon as both have joined
    scene.force.on_hello(second)
    scene.force.on_ready(second, {}, 1.0)  # which it has sent before it was killed
    assert scene.status()[1] is WorkerStatus.RESTARTING
    assert len(scene.told) == told


def test_ranks_that_are_started_in_vain_leave_no_descriptors(
    new_scene: NewScene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = new_scene(models=changed(tmp_path, tp=2))
    held, pipe = os.pipe()
    first = Child("worker-1", "", NoProcess(), held)
    answers = iter((first,))

    def start(*_: object) -> Child:
        for child in answers:
            return child
        raise StartFailedError("no room")

    monkeypatch.setattr(Child, "start", start)
    for rank in (1, 2):
        assert scene.force.replace(scene.started[rank], 0.0) is None
    assert first.process.kills == 1  # type: ignore[attr-defined]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(held)
    os.close(pipe)


def test_a_placeholder_alone_is_no_server(new_scene: NewScene, tmp_path: Path) -> None:
    first, second = new_plan(tmp_path).models
    models = [msgspec.structs.replace(first, remote="edge"), second]
    scene = new_scene(models=models, on_peer_loss="degrade", edge_slots=2)
    causes = [scene.force.replace(scene.started[-1], float(at)) for at in range(3)]
    assert causes[:2] == [None, None]
    assert causes[2] is not None and "worker 1" in causes[2]


def test_what_others_have_at_a_port_that_is_given_up_ends(
    new_scene: NewScene, tmp_path: Path
) -> None:
    """They have it at home; a model here would write on for nobody."""
    first, second = new_plan(tmp_path).models
    models = [msgspec.structs.replace(first, remote="edge"), second]
    scene = new_scene(models=models, on_peer_loss="degrade", edge_slots=2)
    slab, theirs = scene.slab, 4
    slab.gen[theirs], slab.sent[theirs] = 1, 0b11
    slab.baton[theirs] = Baton(3, 0, SlotState.LIVE, Finish.NONE, 0, 2).pack()
    port = scene.started[0]
    for at in range(3):
        assert scene.force.replace(port, float(at)) is None
        port = scene.started[-1]
    assert scene.status() == [WorkerStatus.LOST, WorkerStatus.UP]
    baton = unpack(slab.baton[theirs])
    assert (baton.state, baton.finish) == (SlotState.DONE, Finish.WORKER_LOST)
