"""The gateway by single events, with processes that are none: hung, dead, not to be started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.gateway.stack import new_plan
from tests.launcher.test_workforce import NoProcess
from trserve.children import Child
from trserve.errors import StartFailedError
from trserve.gateway_watch import GatewayWatch
from trserve.ipc.control import GATEWAY_IDENTITY
from trserve.ipc.shared import Shared
from trserve.ipc.slab import Slab
from trserve.worker_lives import REAPED_AFTER_S
from trserve.workforce import START_AGAIN_S

LIMIT_S = 5.0


@dataclass
class Scene:
    """A watch, and all that it did."""

    slab: Slab
    watch: GatewayWatch = field(init=False)
    started: list[Child] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    refuse: int = 0

    def start(self) -> None:
        if self.refuse:
            self.refuse -= 1
            raise StartFailedError("no room")
        process = NoProcess()
        self.started.append(Child(GATEWAY_IDENTITY, "gateway", process, -1, ready=True))

    @property
    def kills(self) -> int:
        process = self.started[-1].process
        assert isinstance(process, NoProcess)
        return process.kills

    def looks(self, begin: float, end: float, *, alive: bool) -> str | None:
        """A look a second; returns the first cause to end."""
        for now in range(int(begin), int(end)):
            if alive:
                self.slab.gateway_heartbeat = now + 1
            if cause := self.watch.tick(self.started[-1], float(now)):
                return cause
        return None


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    plan = new_plan(tmp_path, router="none", watchdog_s=LIMIT_S)
    shared = Shared.create(plan.layout)
    scene = Scene(Slab(shared.slab_fd, plan.layout))
    scene.watch = GatewayWatch(plan, shared, scene.start, scene.notes.append)
    scene.start()
    yield scene
    for fd in (shared.slab_fd, *shared.bells):
        os.close(fd)


def test_one_that_goes_on_is_left_alone(scene: Scene) -> None:
    assert scene.looks(0, 100, alive=True) is None
    assert scene.kills == 0


def test_one_that_hangs_is_killed_once_and_replaced(scene: Scene) -> None:
    scene.looks(0, 10, alive=True)
    assert scene.looks(10, 10 + LIMIT_S + 3, alive=False) is None
    assert scene.kills == 1
    assert scene.watch.replace(scene.started[-1], 20.0) is None
    assert scene.notes == ["gateway hung for 5 s and was killed; 0 requests are cancelled, " + NEW]
    # The next one has all of the time again.
    scene.looks(20, 20 + LIMIT_S, alive=False)
    assert len(scene.started) == 2 and scene.kills == 0


NEW = "a new gateway starts"


def test_one_that_does_not_end_when_it_is_killed_ends_the_server(scene: Scene) -> None:
    cause = scene.looks(0, LIMIT_S + REAPED_AFTER_S + 3, alive=False)
    assert cause is not None and "does not end" in cause
    assert scene.kills == 1


@pytest.mark.parametrize("change", ["loading", "gone"])
def test_one_that_loads_or_is_gone_is_not_looked_at(scene: Scene, change: str) -> None:
    child = None if change == "gone" else scene.started[-1]
    scene.started[-1].ready = False
    for now in range(100):
        assert scene.watch.tick(child, float(now)) is None
    assert scene.kills == 0


def test_a_start_that_is_refused_is_tried_again_and_counts(scene: Scene) -> None:
    scene.refuse = 1
    assert scene.watch.replace(scene.started[0], 0.0) is None
    assert scene.notes[1] == "no room; it is tried again"
    assert scene.watch.tick(None, START_AGAIN_S / 2) is None and len(scene.started) == 1
    assert scene.watch.tick(None, START_AGAIN_S) is None and len(scene.started) == 2
    cause = scene.watch.replace(scene.started[-1], 30.0)
    assert cause is not None and "3 gateways in a minute" in cause


def test_starts_that_are_refused_for_ever_end_the_server(scene: Scene) -> None:
    scene.refuse = 9
    assert scene.watch.replace(scene.started[0], 0.0) is None
    assert scene.watch.tick(None, START_AGAIN_S) == ("no room; 3 gateways in a minute are too many")
