"""Changes of routing over a real socket, with a launcher that is played."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.stack import new_plan
from tests.gateway.test_desk import keyed
from tests.gateway.test_hardening import envelope, exchange, statuses
from tests.gateway.test_http import Gateway, play
from trserve.endpoint_plan import EndpointPlan
from trserve.gateway import routing_admin
from trserve.gateway.routing_admin import PATH, RoutingAdmin
from trserve.keys import digest

ADMIN_KEY = "sk-admin-key"
DESCRIBED = [
    {"name": "tau", "help": "a threshold", "default": 0.03, "minimum": 0, "maximum": 1},
    {"name": "fixed", "help": "not a request's", "default": 1.0, "per_request": False},
]


class Launcher:
    """Answers as the launcher does, and keeps what it is told."""

    def __init__(self, admin: RoutingAdmin) -> None:
        self.admin = admin
        self.told: list[dict[str, Any]] = []
        self.router: dict[str, float] = {}
        self.rows: dict[str, list[int]] | None = None
        self.answers = True
        admin.ask = self.ask

    def ask(self, message: dict[str, Any]) -> None:
        self.told.append(message)
        self.router |= message.get("router", {})
        if "rows" in message:
            self.rows = message["rows"]
        answer = {"type": "routing", "number": message["number"], "router": dict(self.router)}
        answer |= {"rows": self.rows or {"4": [1, 2]}, "held": self.rows is not None}
        if self.answers:
            assert self.admin.on_message(answer)


Story = Callable[[Gateway, Launcher], Any]


def run(story: Story, folder: Path, **changes: Any) -> None:
    async def whole(g: Gateway) -> None:
        described = [{**each, "value": 0.06} for each in DESCRIBED]
        g.service.set_router_parameters(described)
        admin = RoutingAdmin(new_plan(folder, **changes), g.service)
        g.app.add_routes(admin.table)
        await story(g, Launcher(admin))

    play(whole, folder, endpoint=EndpointPlan(admin_key=digest(ADMIN_KEY), log_requests=False))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


async def ask(g: Gateway, body: Any = None) -> bytes:
    raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    method = "GET" if body is None else "POST"
    head = f"{method} {PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(raw)}\r\n\r\n".encode()
    return await exchange(g, keyed(head + raw, "connection: close", key=ADMIN_KEY))


def body_of(answer: bytes) -> dict[str, Any]:
    assert statuses(answer) == [200], answer
    found: dict[str, Any] = json.loads(answer.partition(b"\r\n\r\n")[2])
    return found


def test_what_holds_can_be_asked_for_and_changes_nothing(folder: Path) -> None:
    async def story(g: Gateway, launcher: Launcher) -> None:
        body = body_of(await ask(g))
        assert launcher.told == [{"type": "routing", "number": 0}]
        tau = {"value": 0.06, "started_with": 0.06, "help": "a threshold"}
        assert body["router"] == {"name": "r-stitch", "parameters": {"tau": tau}}
        thresholds = {"source": "auto", "models": ["m0", "m1"], "rows": {"4": [1, 2]}}
        assert body["batch_threshold"] == thresholds

    run(story, folder)


def test_a_change_is_passed_on_told_and_audited(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(g: Gateway, launcher: Launcher) -> None:
        body = body_of(await ask(g, {"router": {"tau": 0.5}, "batch_threshold": [1, 3]}))
        assert body["router"]["parameters"]["tau"]["value"] == 0.5
        rows = {"1": [1, 1], "2": [1, 2], "3": [1, 3]}
        assert body["batch_threshold"] == {"source": "admin", "models": ["m0", "m1"], "rows": rows}
        change = launcher.told[-1]
        assert (change["router"], change["rows"]) == ({"tau": 0.5}, rows)
        body = body_of(await ask(g, {"router": {"tau": None}, "batch_threshold": "auto"}))
        assert body["router"]["parameters"]["tau"]["value"] == 0.06
        assert body["batch_threshold"]["source"] == "auto"
        body_of(await ask(g, {"batch_threshold": {"4": [1, 2], "2": [1, 1]}}))
        assert launcher.told[-1]["rows"] == {"2": [1, 1], "4": [1, 2]}

    with caplog.at_level(logging.INFO, routing_admin.__name__):
        run(story, folder)
    first, second, _ = (record.getMessage() for record in caplog.records)
    assert first.startswith("routing changed by admin, request ")
    assert "tau from 0.06 to 0.5; batch thresholds from auto 4:1/2 to admin 1:1/1" in first
    assert "tau from 0.5 to 0.06" in second
    assert ADMIN_KEY not in caplog.text


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"[]", None),
        ({}, None),
        ({"routers": {}}, None),
        ({"router": 5}, "router"),
        ({"router": {"tau": 2}}, "router"),
        ({"router": {"tau": "0.5"}}, "router"),
        ({"router": {"tau": True}}, "router"),
        ({"router": {"fixed": 1}}, "router"),
        ({"router": {"other": 1}}, "router"),
        ({"router": {"other": None}}, "router"),
        ({"batch_threshold": None}, "batch_threshold"),
        ({"batch_threshold": 3}, "batch_threshold"),
        ({"batch_threshold": {"1000000000": [1, 1]}}, "batch_threshold"),
        ({"batch_threshold": {"0": [1, 1]}}, "batch_threshold"),
        ({"batch_threshold": [1]}, "batch_threshold"),
        ({"batch_threshold": [1, 0]}, "batch_threshold"),
        ({"batch_threshold": [1, 2.0]}, "batch_threshold"),
        ({"batch_threshold": [True, 1]}, "batch_threshold"),
        ({"batch_threshold": [1, 5]}, "batch_threshold"),
        ({"batch_threshold": {}}, "batch_threshold"),
        ({"batch_threshold": {"x": [1, 1]}}, "batch_threshold"),
        ({"batch_threshold": {"2": [1, 4]}}, "batch_threshold"),
        ({"router": {"tau": 0.5}, "batch_threshold": "never"}, "batch_threshold"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_and_changes_nothing(
    folder: Path, body: Any, param: str | None
) -> None:
    async def story(g: Gateway, launcher: Launcher) -> None:
        answer = await ask(g, body)
        assert statuses(answer) == [400]
        assert envelope(answer)["param"] == param
        assert launcher.told == []

    run(story, folder)


def test_what_a_target_share_moves_is_not_set_beside_it(folder: Path) -> None:
    async def story(g: Gateway, launcher: Launcher) -> None:
        for value in (0.5, None):
            answer = await ask(g, {"router": {"tau": value}, "batch_threshold": [1, 3]})
            assert statuses(answer) == [409]
            told = envelope(answer)
            assert (told["param"], told["code"]) == ("router", "follows_target_share")
            assert told["message"].startswith("tau follows target_share = 0.2 ")
        assert launcher.told == []
        body_of(await ask(g, {"batch_threshold": [1, 3]}))

    run(story, folder, router_config={"tau": 0.03, "target_share": 0.2})


def test_without_a_share_to_keep_the_threshold_is_the_administrators(folder: Path) -> None:
    async def story(g: Gateway, launcher: Launcher) -> None:
        body_of(await ask(g, {"router": {"tau": 0.5}}))
        assert launcher.router == {"tau": 0.5}

    run(story, folder, router_config={"tau": 0.03, "target_share": 0.0})


def test_fixed_thresholds_are_the_starts(folder: Path) -> None:
    async def story(g: Gateway, launcher: Launcher) -> None:
        assert body_of(await ask(g))["batch_threshold"]["source"] == "start"

    run(story, folder, batch_threshold=[1, 2])


def test_a_launcher_that_does_not_answer_is_not_waited_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routing_admin, "ANSWER_WITHIN_S", 0.05)

    async def story(g: Gateway, launcher: Launcher) -> None:
        launcher.answers = False
        answer = await ask(g, {"router": {"tau": 0.5}})
        assert statuses(answer) == [503]
        assert b"retry-after: 1" in answer
        launcher.answers = True
        assert launcher.admin.on_message({"type": "routing", "number": 0}), "too late, and dropped"
        body_of(await ask(g))
        assert not launcher.admin.on_message({"type": "worker_up", "model": 0})

    run(story, folder)


def test_a_change_that_nobody_confirms_is_logged_as_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(routing_admin, "ANSWER_WITHIN_S", 0.05)

    async def story(g: Gateway, launcher: Launcher) -> None:
        hears = launcher.ask

        def hears_questions(message: dict[str, Any]) -> None:
            launcher.answers = set(message) == {"type", "number"}
            hears(message)

        launcher.admin.ask = hears_questions
        for thresholds in ("auto", [1, 3]):
            body = {"router": {"tau": 0.5}, "batch_threshold": thresholds}
            assert statuses(await ask(g, body)) == [503]

    with caplog.at_level(logging.INFO, routing_admin.__name__):
        run(story, folder)
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("routing change requested by admin, request ")
    assert first.endswith("not confirmed: tau to 0.5; batch thresholds to auto")
    assert second.endswith("batch thresholds to 1:1/1,2:1/2,3:1/3")


def test_a_value_that_the_router_does_not_tell_can_be_changed(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(g: Gateway, launcher: Launcher) -> None:
        g.service.router_values = {"tau": None}
        body = body_of(await ask(g, {"router": {"tau": 0.5}}))
        assert body["router"]["parameters"]["tau"]["started_with"] is None

    with caplog.at_level(logging.INFO, routing_admin.__name__):
        run(story, folder)
    assert "tau from its own to 0.5" in caplog.text
