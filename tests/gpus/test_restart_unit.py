"""Workers that share a GPU through MPS are replaced together, by single events.

Processes and the daemon are EMULATED: what is tested is who is ended, blamed and started, and when.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.gateway.stack import new_plan
from tests.launcher.test_workforce import NoProcess, Scene
from trserve.children import Child
from trserve.errors import StartupError
from trserve.gpus import side
from trserve.gpus.plan import GpuPlan
from trserve.gpus.programs import DriverError
from trserve.ipc.baton import Baton, Finish, SlotState
from trserve.ipc.child import ChildArguments
from trserve.ipc.shared import Shared
from trserve.ipc.slab import Slab, WorkerStatus
from trserve.worker_lives import REAPED_AFTER_S
from trserve.workforce import Workforce

GPU = "GPU-emulated"
SHARED = GpuPlan(
    uuids=[[GPU], [GPU]],
    clients={GPU: [0, 1]},
    percentages=[100, 100],
    memory_limits=[2**30, 0],
)


def asked(mps: str) -> GpuPlan:
    return msgspec.structs.replace(SHARED, mps=mps)


class EmulatedDaemon:
    """Says that it is well, until it is told not to."""

    made: list[EmulatedDaemon]
    refuses = False

    def __init__(self, uuid: str, directory: Path, percent: int) -> None:
        if self.refuses:
            raise DriverError("EMULATED: no")
        self.well = self.is_alive = True
        self.is_in_background = self.retired = False
        self.environment = {"CUDA_MPS_PIPE_DIRECTORY": str(directory)}
        self.made.append(self)

    def is_well(self) -> bool:
        return self.well

    def retire(self) -> None:
        self.retired = True

    def close(self) -> None:
        self.retire()


NewScene = Callable[..., Scene]


@pytest.fixture
def daemons(monkeypatch: pytest.MonkeyPatch) -> list[EmulatedDaemon]:
    """Every daemon that is made, first to last."""
    monkeypatch.setattr(EmulatedDaemon, "made", [], raising=False)
    monkeypatch.setattr(side, "MpsDaemon", EmulatedDaemon)
    return EmulatedDaemon.made


@pytest.fixture
def new_scene(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, daemons: list[EmulatedDaemon]
) -> Iterator[NewScene]:
    def start(identity: str, title: str, module: str, arguments: Any, env: dict[str, str]) -> Child:
        process = NoProcess()
        process.env = env  # type: ignore[attr-defined]
        return Child(identity, title, process, -1)

    monkeypatch.setattr(Child, "start", start)
    with ExitStack() as stack:

        def make(**changes: Any) -> Scene:
            plan = new_plan(tmp_path, router="none", **{"gpu": SHARED, **changes})
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
            scene.told.clear()
            return scene

        yield make


def test_everybody_on_the_gpu_is_replaced_once_all_have_gone(new_scene: NewScene) -> None:
    scene = new_scene()
    assert scene.force.replace(scene.started[1], 0.0) is None
    assert scene.process(0).kills == 1
    assert len(scene.started) == 2, "the other one is still on the GPU"
    assert list(scene.force.due()) == [], "and its end is the next event"
    assert scene.force.replace(scene.started[0], 0.1) is None
    assert [child.identity for child in scene.started[2:]] == ["worker-0", "worker-1"]
    assert scene.kinds() == [("worker_down", 1), ("worker_down", 0)]
    assert "whose GPU it shares" in scene.told[1]["message"]
    for child in scene.started[2:]:
        scene.serve(child)
    assert scene.status() == [WorkerStatus.UP] * 2


def test_deaths_of_those_who_share_do_not_count(new_scene: NewScene) -> None:
    """Two deaths of each in a minute would be four: it is the third of one that ends the server."""
    scene = new_scene()
    for at in (0.0, 1.0):
        for first in (0, 1):
            latest = {child.identity: child for child in scene.started}
            mine, other = latest[f"worker-{first}"], latest[f"worker-{1 - first}"]
            assert scene.force.replace(mine, at) is None
            assert scene.force.replace(other, at) is None
            for child in scene.started[-2:]:
                scene.serve(child)
    latest = {child.identity: child for child in scene.started}
    cause = scene.force.replace(latest["worker-0"], 2.0)
    assert cause is not None and "too often" in cause


def running(scene: Scene, worker: int, slot: int) -> None:
    """``worker`` has a request in its step."""
    scene.slab.gen[slot], scene.slab.sent[slot] = 1, 0b11
    scene.slab.baton[slot] = Baton(3, worker, SlotState.LIVE, Finish.NONE, 0, 0).pack()
    scene.slab.in_step[worker][:2] = 1, slot


@pytest.mark.parametrize("ended_by", ["our-kill", "its-own-fault"])
def test_requests_of_those_who_were_killed_are_no_suspects(
    new_scene: NewScene, ended_by: str
) -> None:
    """One that had a fault of its own may have been the cause as well."""
    scene = new_scene()
    running(scene, 0, slot=0)
    running(scene, 1, slot=1)
    scene.force.replace(scene.started[1], 0.0)
    if ended_by == "its-own-fault":
        scene.process(0).returncode = 5
    scene.force.replace(scene.started[0], 0.0)
    assert scene.slab.suspect[1] == 1
    assert scene.slab.suspect[0] == (1 if ended_by == "its-own-fault" else 0)


def test_one_that_does_not_leave_the_gpu_ends_the_server(new_scene: NewScene) -> None:
    scene = new_scene()
    scene.force.replace(scene.started[1], 0.0)
    assert scene.force.tick(REAPED_AFTER_S - 1) is None
    cause = scene.force.tick(REAPED_AFTER_S)
    assert cause is not None and "worker 0" in cause and "does not end" in cause


def both_die(scene: Scene, at: float) -> str | None:
    """The latest two, one after the other; why the server must end."""
    first, second = scene.started[-2:]
    return scene.force.replace(first, at) or scene.force.replace(second, at)


def test_a_daemon_that_is_well_stays_and_another_is_replaced(
    new_scene: NewScene, daemons: list[EmulatedDaemon]
) -> None:
    scene = new_scene()
    both_die(scene, 0.0)
    assert len(daemons) == 1
    daemons[0].well = False
    both_die(scene, 1.0)
    assert len(daemons) == 2 and daemons[0].retired
    pipes = [child.process.env["CUDA_MPS_PIPE_DIRECTORY"] for child in scene.started[-2:]]  # type: ignore[attr-defined]
    assert pipes == [daemons[1].environment["CUDA_MPS_PIPE_DIRECTORY"]] * 2


@pytest.mark.parametrize("mps", ["auto", "on"])
def test_a_daemon_that_does_not_come_back(
    new_scene: NewScene, daemons: list[EmulatedDaemon], monkeypatch, mps: str
) -> None:
    """With auto the workers go on without, each on its own from then on."""
    scene = new_scene(gpu=asked(mps))
    daemons[0].well = False
    monkeypatch.setattr(EmulatedDaemon, "refuses", True)
    cause = both_die(scene, 0.0)
    if mps == "on":
        assert cause is not None and "--mps on" in cause
        return
    assert cause is None
    assert {"type": "mps", "models": [("unavailable", "EMULATED: no")] * 2} in scene.told
    for child in scene.started[-2:]:
        scene.serve(child)
    scene.force.replace(scene.started[-1], 1.0)
    assert scene.process(-2).kills == 0


@pytest.mark.parametrize("mps", ["auto", "on"])
def test_a_daemon_that_cannot_be_had_at_the_start(
    new_scene: NewScene, monkeypatch, mps: str
) -> None:
    monkeypatch.setattr(EmulatedDaemon, "refuses", True)
    if mps == "on":
        with pytest.raises(StartupError, match=r"--mps on: .*EMULATED: no") as said:
            new_scene(gpu=asked(mps))
        assert said.value.exit_code == 3
        return
    scene = new_scene(gpu=asked(mps))
    assert "take turns" in scene.notes[0]
    assert scene.force.serve_message()["mps"] == [("unavailable", "EMULATED: no")] * 2


def test_a_daemon_that_ends_is_noticed_and_its_workers_go_on(
    new_scene: NewScene, daemons: list[EmulatedDaemon]
) -> None:
    scene = new_scene()
    daemons[0].is_alive = False
    scene.look(0.0)
    ((state, reason), _) = scene.told[-1]["models"]
    assert state == "unavailable" and "has ended" in reason
    assert not any(child.process.kills for child in scene.started)  # type: ignore[attr-defined]
    both_die(scene, 1.0)
    assert len(daemons) == 2
    assert scene.told[-1] != scene.told[0]
    assert ("on", "") in scene.force.serve_message()["mps"]


@pytest.mark.parametrize("mps", ["auto", "on"])
def test_a_worker_that_does_not_use_the_daemon(new_scene: NewScene, mps: str) -> None:
    scene = new_scene(gpu=asked(mps))
    both_die(scene, 0.0)
    child = scene.started[-1]
    scene.force.on_hello(child)
    scene.force.on_ready(child, {"mps": False}, 1.0)
    if mps == "on":
        assert not child.ready and scene.process().kills == 1
        assert child.failure is not None and "--mps on" in child.failure[0]
    else:
        assert child.ready
        assert scene.force.serve_message()["mps"][1][0] == "unavailable"


def test_what_workers_find_in_their_environment(new_scene: NewScene) -> None:
    scene = new_scene()
    first, second = (child.process.env for child in scene.started)  # type: ignore[attr-defined]
    assert first["CUDA_VISIBLE_DEVICES"] == second["CUDA_VISIBLE_DEVICES"] == GPU
    assert first["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "100"
    assert first["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=1024M"
    assert "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT" not in second


def test_models_without_mps_are_replaced_alone(new_scene: NewScene) -> None:
    """And they look for a daemon where there is none: nobody else's is used by chance."""
    scene = new_scene(gpu=GpuPlan(uuids=[[GPU], [GPU]], percentages=[0, 0], memory_limits=[0, 0]))
    assert not os.path.exists(scene.process(0).env["CUDA_MPS_PIPE_DIRECTORY"])
    scene.force.replace(scene.started[1], 0.0)
    assert len(scene.started) == 3 and scene.process(0).kills == 0
    assert scene.force.serve_message()["mps"] == [("off", ""), ("off", "")]
