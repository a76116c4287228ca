"""What the actors of a cluster run, and how one fills in what only it knows."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from trserve.cli import main
from trserve.cluster.actor import GroupActor
from trserve.cluster.parts import API_KEYS, HOME_KEYS, MEMBER_KEYS, SETTINGS, parts_of
from trserve.cluster.relay import Relay
from trserve.config import config_from_flags
from trserve.config_sources import gather
from trserve.endpoint_plan import plan_endpoint
from trserve.keys import digest


def settings_of(text: str) -> dict[str, object]:
    return {key: value for key, value in yaml.safe_load(text).items() if value not in ("", [])}


def test_one_host_runs_what_was_asked_for() -> None:
    config = config_from_flags({"executor": "ray", "threads": (2, 1), "batch_threshold": (1, 3)})
    (home,) = parts_of(config, 0, "inner", None)
    said = settings_of(home.files[SETTINGS])
    assert said["models"] == "tiny,small"
    assert said["host"] == "{host}"
    assert (said["port"], said["executor"]) == (0, "local")
    assert home.environment == {"TRSERVE_API_KEY": "inner"}
    assert (home.cpus, home.gpus, list(home.members)) == (3, 0, [])


def test_two_hosts_dial_each_other() -> None:
    flags = {"executor": "ray", "models": ("a", "b", "c"), "host_groups": ((0, 2), (1,))}
    home, member = parts_of(config_from_flags(flags), 0, None, ("dials", "listens"))
    assert settings_of(home.files[SETTINGS])["models"] == "a,b@{peer-1},c"
    assert (list(home.members), home.files[HOME_KEYS]) == ([1], "dials")
    said = settings_of(member.files[SETTINGS])
    assert said["models"] == "a@edge,b,c@edge"
    assert said["edge-listen"] == "{host}:{port}"
    assert member.files[MEMBER_KEYS] == "listens"


def test_every_server_asks_for_the_clients_keys() -> None:
    """Without them it would answer whoever finds its port."""
    keys = {"api_key": ("sk-one", "sk-two"), "admin_key": "sk-admin"}
    flags = {"executor": "ray", "host_groups": ((0,), (1,)), **keys}
    for part in parts_of(config_from_flags(flags), 0, None, ("dials", "listens")):
        assert part.files[API_KEYS] == "sk-one\nsk-two"
        assert "sk-" not in part.files[SETTINGS] and "sk-" not in str(part.environment)
        actor = GroupActor(part.arguments, part.environment, part.files, part.members, "127.0.0.1")
        environment = actor._process._environment
        config = gather({}, actor._folder / SETTINGS, environment).config()
        with pytest.MonkeyPatch.context() as patch:
            for name in ("TRSERVE_API_KEY", "TRSERVE_ADMIN_KEY"):
                patch.setenv(name, environment[name])
            plan = plan_endpoint(config.endpoint)
        assert plan.api_keys == (digest("sk-one"), digest("sk-two"))
        assert plan.admin_key == digest("sk-admin")
        actor.stop(0.1)


def test_members_ask_for_a_key_too() -> None:
    flags = {"executor": "ray", "host_groups": ((0,), (1,))}
    parts = parts_of(config_from_flags(flags), 0, "inner", ("dials", "listens"))
    assert [part.environment for part in parts] == [{"TRSERVE_API_KEY": "inner"}] * 2


def test_settings_of_links_and_ranks_reach_the_hosts() -> None:
    flags = {"executor": "ray", "link_heartbeat_s": 2.5, "tp": (1, 2), "threads": (1, 3)}
    (home,) = parts_of(config_from_flags(flags), 0, None, None)
    assert settings_of(home.files[SETTINGS])["link-heartbeat-s"] == 2.5
    assert (home.cpus, home.gpus) == (7, 0)
    (home,) = parts_of(config_from_flags({**flags, "device": "cuda"}), 0, None, None)
    assert home.gpus == 2


def test_gpus_are_counted_once() -> None:
    flags = {"executor": "ray", "device": "cuda", "gpus": ((0,), (0, 1))}
    (home,) = parts_of(config_from_flags(flags), 0, None, None)
    assert home.gpus == 2


def test_an_actor_fills_in_its_place_and_waits_for_its_members() -> None:
    files = {SETTINGS: "host: {host}\nmodels: a,b@{peer-1}\nkeys: {folder}/k\n"}
    actor = GroupActor(["launch", "{folder}"], {}, files, [1], "127.0.0.1")
    said = (actor._folder / SETTINGS).read_text()
    assert f"b@127.0.0.1:{actor._relays[1].port}" in said and "host: 127.0.0.1" in said
    assert (actor._folder / SETTINGS).stat().st_mode & 0o777 == 0o600
    assert actor.status()["detail"] == "waits for the other hosts"
    folder = actor._folder
    assert actor.stop(0.1) is None
    assert not Path(folder).exists()


def test_an_actor_removes_the_keys_of_those_that_were_killed_and_of_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = (
        "import os, signal, sys, tempfile\n"
        "from trserve.cluster.actor import GroupActor\n"
        f"tempfile.tempdir = {str(tmp_path)!r}\n"
        "GroupActor([], {}, {'keys': 'sk-theirs'}, [1], '127.0.0.1')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    (dead,) = tmp_path.iterdir()
    assert (dead / "keys").exists()
    actors = [GroupActor([], {}, {"keys": "sk-ours"}, [1], "127.0.0.1") for _ in range(2)]
    assert not dead.exists()
    assert all((actor._folder / "keys").read_text() == "sk-ours" for actor in actors)
    for actor in actors:
        actor.stop(0.1)
    assert not list(tmp_path.iterdir())


def test_a_relay_follows_its_peer() -> None:
    async def run() -> None:
        async def echo(
            name: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
        ) -> None:
            while piece := await reader.read(100):
                writer.write(name + piece)
            writer.close()

        servers = [
            await asyncio.start_server(lambda r, w, n=name: echo(n, r, w), "127.0.0.1", 0)
            for name in (b"one", b"two")
        ]
        relay = Relay()
        for server, name in zip(servers, (b"one", b"two"), strict=True):
            relay.connect("127.0.0.1", server.sockets[0].getsockname()[1])
            await asyncio.sleep(0.05)
            reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
            writer.write(b"x")
            assert await reader.read(100) == name + b"x"
            if name == b"one":
                relay.connect("127.0.0.1", servers[1].sockets[0].getsockname()[1])
                assert await reader.read(100) == b""  # cut: the peer is elsewhere
            writer.close()
        for server in servers:
            server.close()

    asyncio.run(asyncio.wait_for(run(), 10))
    assert any(thread.name == "relay" for thread in threading.enumerate())


def test_flags_that_are_wrong_are_refused() -> None:
    for flags, said in (
        (["--replicas", "2"], "--replicas: is for --executor ray"),
        (["--executor", "ray", "--host-groups", "0/0"], "each of the 2 models once"),
        (["--executor", "ray", "--host-groups", "1/0"], "the entry, must be in the first"),
        (["--executor", "ray", "--host-groups", "0/1", "--edge-listen", "x:1"], "wants one server"),
    ):
        result = CliRunner().invoke(main, ["launch", *flags])
        assert result.exit_code == 2
        assert said in result.output


def test_a_settings_file_says_the_same_again(tmp_path: Path) -> None:
    config = config_from_flags({"executor": "ray", "gpus": ((0,), (0, 1)), "threads": (2, 1)})
    (home,) = parts_of(config, 0, None, None)
    file = tmp_path / SETTINGS
    file.write_text(home.files[SETTINGS].replace("{host}", "127.0.0.1"))
    read = gather({}, file, {}).config()
    assert read.placement == config.placement
    assert read.engine == config.engine
