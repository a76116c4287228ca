"""What the endpoint's process makes of what actors say; Ray is played, and places nothing."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trserve.cluster import ray_launch
from trserve.cluster.parts import Part
from trserve.cluster.ray_launch import Cluster, Replica
from trserve.config import config_from_flags
from trserve.errors import EXIT_UNAVAILABLE, EXIT_WORKER_LOST, ConfigError
from trserve.keys import digest

RAY = SimpleNamespace(exceptions=SimpleNamespace(RayError=KeyError))


class PlayedActor:
    """Answers at once; ``said`` is its next status."""

    def __init__(self) -> None:
        self.said: dict[str, Any] = {"url": "", "detail": "starting", "exit_code": None}
        self.told: list[tuple[int, str, int]] = []
        self.status = SimpleNamespace(remote=lambda: answer(dict(self.said)))
        self.connect = SimpleNamespace(remote=lambda *where: answer(self.told.append(where)))


def answer(value: object) -> Any:
    made: Future[object] = Future()
    made.set_result(value)
    return SimpleNamespace(future=lambda: made)


def cluster_of(*replicas: Replica, ready: bool = False) -> Cluster:
    groups = SimpleNamespace(move=lambda *_: None, all=())
    cluster = Cluster(RAY, replicas, SimpleNamespace(groups=groups), None)  # type: ignore[arg-type]
    cluster._is_ready = ready
    return cluster


def test_a_home_is_told_of_members_that_serve() -> None:
    """It asks them about their models before it plans, and would end if they did not answer."""
    home, member = PlayedActor(), PlayedActor()
    parts = [Part("home", (), {}, members=(1,)), Part("member", (), {})]
    cluster = cluster_of(Replica([home, member], parts))
    member.said |= {"address": "10.0.0.2", "port": 7}
    asyncio.run(cluster._ask(0))
    assert home.told == []
    member.said["url"] = "http://127.0.0.1:1"
    asyncio.run(cluster._ask(0))
    assert home.told == [(1, "10.0.0.2", 7)]


def test_one_replica_that_cannot_come_back_does_not_end_the_others() -> None:
    actors = [PlayedActor(), PlayedActor()]
    replicas = [Replica([actor], [Part("replica", (), {})]) for actor in actors]
    actors[1].said |= {"exit_code": 3, "detail": "ended with 3: no GPU here"}

    def failed(*, ready: bool) -> int | None:
        cluster = cluster_of(*replicas, ready=ready)
        for index in range(len(replicas)):
            asyncio.run(cluster._ask(index))
        return cluster._failed()

    assert failed(ready=False) == 3
    assert failed(ready=True) is None
    actors[0].said["exit_code"] = 2
    assert failed(ready=True) == EXIT_WORKER_LOST


class ActorDied(KeyError):
    """Ray's word for an actor whose constructor failed; it is not made again."""

    actor_init_failed = True

    def __str__(self) -> str:
        return "The actor died in its creation task:\nTraceback ...\nImportError: no trserve\n"


def test_an_actor_that_cannot_be_made_ends_the_start() -> None:
    actor = PlayedActor()
    failed: Future[object] = Future()
    failed.set_exception(ActorDied())
    actor.status.remote = lambda: SimpleNamespace(future=lambda: failed)
    replica = Replica([actor], [Part("replica 0", (), {})])
    cluster = cluster_of(replica)
    asyncio.run(cluster._ask(0))
    assert cluster._failed() == EXIT_UNAVAILABLE
    assert "ImportError: no trserve" in replica.detail and "restarts" not in replica.detail


def test_keys_are_read_once_and_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRSERVE_API_KEY", "sk-one,sk-two")
    monkeypatch.setenv("TRSERVE_ADMIN_KEY", "sk-admin")
    config, endpoint = ray_launch._with_keys(config_from_flags({"executor": "ray"}))
    assert config.endpoint.api_key == ("sk-one", "sk-two")
    assert config.endpoint.admin_key == "sk-admin"
    assert endpoint.api_keys == (digest("sk-one"), digest("sk-two"))


def test_a_key_that_a_file_does_not_hold_as_it_is_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replicas would take the one for a comment; the other would be read as the name of a file."""
    file = tmp_path / "keys"
    file.write_text("sk-one\n@secret\n")
    admins = tmp_path / "admin"
    admins.write_text("@secret\n")
    monkeypatch.setenv("TRSERVE_API_KEY", "sk-one,#secret")
    given: dict[str, dict[str, object]] = {
        "TRSERVE_API_KEY: key 2 begins with #": {},  # which forgets it
        "--api-key: key 1 begins with #": {"api_key": ("#secret",)},
        "--api-key: key 2 begins with @": {"api_key": (f"@{file}",)},
        "--admin-key: key 1 begins with #": {"admin_key": "#secret"},
        "--admin-key: key 1 begins with @": {"admin_key": f"@{admins}"},
    }
    for said, flags in given.items():
        with pytest.raises(ConfigError) as refused:
            ray_launch._with_keys(config_from_flags({"executor": "ray", **flags}))
        assert said in str(refused.value) and "secret" not in str(refused.value)
    config, _ = ray_launch._with_keys(config_from_flags({"executor": "ray", "api_key": ("x#@",)}))
    assert config.endpoint.api_key == ("x#@",)


def test_an_actor_that_is_only_late_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_launch, "ASK_TIMEOUT_S", 0.01)
    actor = PlayedActor()
    replica = Replica([actor], [Part("replica", (), {})])
    cluster = cluster_of(replica)
    actor.said["url"] = "http://10.0.0.2:7"
    asyncio.run(cluster._ask(0))
    actor.status.remote = lambda: SimpleNamespace(future=Future)  # which nothing ever comes of
    asyncio.run(cluster._ask(0))
    assert replica.url == "http://10.0.0.2:7"
    assert "does not answer" in replica.detail
