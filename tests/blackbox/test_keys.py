"""A server with keys: who gets in, what an admin changes while it serves, and what nobody sees."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.procfs import command
from tests.serverproc import Server, StartFailedError, wait_until

KEY, ADMIN, VARIABLE_KEY = "sk-black-box-key", "sk-black-box-admin", "sk-from-the-environment"
SECRETS = (KEY, ADMIN, VARIABLE_KEY)
ROUTING = "/v1/trserve/routing"
COMPLETIONS = "/v1/completions"
LONG = 1000
BODY = {"prompt": [5, 6, 7], "max_tokens": 40, "temperature": 0, "ignore_eos": True}
ARGS = ["--device", "cpu", "--log-format", "json"]


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = tmp_path_factory.mktemp("keys")
    (folder / "admin").write_text(ADMIN + "\n")
    args = [*ARGS, "--admin-key", f"@{folder / 'admin'}"]
    with Server(args, env={"TRSERVE_API_KEY": f"{KEY},{VARIABLE_KEY}"}) as running:
        yield running


def usage(server: Server, **changes: Any) -> dict[str, Any]:
    response = server.request("POST", COMPLETIONS, BODY | changes, headers=bearer(KEY))
    assert response.status == 200
    found: dict[str, Any] = response.json()["usage"]["trserve"]
    return found


def change(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    response = server.request("POST", ROUTING, body, headers=bearer(ADMIN))
    assert response.status == 200, response.body
    found: dict[str, Any] = response.json()
    return found


def test_who_gets_in(server):
    for path, status in (("/livez", 200), ("/health", 200), ("/metrics", 200), ("/version", 401)):
        assert server.request("GET", path).status == status
    refused = server.request("POST", COMPLETIONS, BODY, headers=bearer("wrong"))
    assert refused.status == 401
    assert set(refused.json()["error"]) == {"message", "type", "param", "code"}
    for key in SECRETS:
        assert server.request("POST", COMPLETIONS, BODY, headers=bearer(key)).status == 200
    assert server.request("GET", ROUTING, headers=bearer(KEY)).status == 403


def test_router_parameters_change_while_it_serves_and_a_request_has_its_own(server):
    assert change(server, {"router": {"tau": 1.0}})["router"]["parameters"]["tau"]["value"] == 1.0
    assert usage(server)["handoffs"] == 0
    own = {"trserve": {"router": {"tau": 0.0}}}
    assert usage(server, **own)["share"] > 0.5
    change(server, {"router": {"tau": 0.0}})
    assert usage(server)["share"] > 0.5
    change(server, {"router": {"tau": None}})


def scraped(server: Server, series: str) -> float:
    lines = server.request("GET", "/metrics").body.decode().splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"trserve_{series} "))


def test_the_threshold_in_force_is_shown_and_who_set_one_is_counted(server):
    setters = {who: f'threshold_overrides_total{{by="{who}"}}' for who in ("server", "request")}
    before = {who: scraped(server, series) for who, series in setters.items()}
    for value in (1.0, 0.25):
        change(server, {"router": {"tau": value}})
        shows = wait_until(
            lambda: scraped(server, 'threshold{router="r-stitch"}'), value.__eq__, 5.0
        )
        assert shows == value
    usage(server, trserve={"router": {"tau": 0.5}})
    change(server, {"router": {"tau": None}})
    after = {who: scraped(server, series) for who, series in setters.items()}
    assert {who: after[who] - before[who] for who in setters} == {"server": 3, "request": 1}


def test_a_change_reaches_a_request_that_is_being_written(server):
    """Also where nothing else happens to the batch, so that its rows are kept."""
    change(server, {"router": {"tau": 1.0}})
    sent = {**BODY, "max_tokens": LONG, "stream": True, "trserve": {"trace": True}}
    with server._exchange("POST", COMPLETIONS, sent, bearer(KEY), 60.0) as response:
        sources: list[int] = []
        changed: dict[str, Any] = {}
        for line in iter(response.readline, b""):
            if not line.startswith(b"data: {"):
                continue
            sources += json.loads(line[6:])["choices"][0]["trserve"]["source"]
            if not changed and len(sources) >= 20:
                changed = change(server, {"router": {"tau": 0.0}})
    assert len(sources) == LONG
    assert set(sources[:10]) == {0} and 1 in sources
    change(server, {"router": {"tau": None}})


def test_thresholds_change_while_it_serves(server):
    held = change(server, {"batch_threshold": [1, 2]})["batch_threshold"]
    assert (held["source"], held["rows"]["2"]) == ("admin", [1, 2])
    assert usage(server)["tokens"]
    assert change(server, {"batch_threshold": "auto"})["batch_threshold"]["source"] == "auto"


def test_each_request_and_each_change_has_a_line(server):
    request_id = {"x-request-id": "mine-1", **bearer(KEY)}
    assert server.request("POST", COMPLETIONS, BODY, headers=request_id).status == 200

    def entries() -> list[dict[str, Any]]:
        lines = server.stderr.splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    found = wait_until(
        entries, lambda each: any(e.get("request_id") == "mine-1" for e in each), 10.0
    )
    (mine,) = [entry for entry in found if entry.get("request_id") == "mine-1"]
    assert (mine["status"], mine["completion_tokens"], mine["key"]) == (200, 40, "key-1")
    change(server, {"router": {"tau": None}})
    wait_until(
        entries, lambda each: "routing changed by admin" in each[-2].get("message", ""), 10.0
    )
    assert any("routing changed by admin" in e.get("message", "") for e in entries())


def test_no_key_is_seen_anywhere(server):
    shown = server.stderr + "".join(server.stdout) + server.request("GET", "/metrics").body.decode()
    for pid in (server.pid, *server.children()):
        shown += command(pid)
        if pid != server.pid:
            shown += Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    for secret in SECRETS:
        assert secret not in shown


@pytest.mark.parametrize(
    ("args", "env", "says"),
    [
        (["--api-key", ""], {}, "empty key"),
        (["--api-key", f"{KEY},"], {}, "empty key"),
        ([], {"TRSERVE_API_KEY": ""}, "TRSERVE_API_KEY: an empty key"),
        (["--api-key", KEY, "--admin-key", KEY], {}, "one of the API keys"),
        (["--api-key", "@/no/such/file"], {}, "No such file"),
    ],
)
def test_weak_keys_are_refused_before_anything_loads(args, env, says):
    with pytest.raises(StartFailedError) as caught, Server([*ARGS, *args], env=env):
        pass
    assert caught.value.code == 2
    assert says in caught.value.stderr
    assert KEY not in caught.value.stderr
