"""Where an endpoint's keys come from, what is refused, and that no message or plan shows one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from trserve.cli import main
from trserve.config import config_from_flags
from trserve.config_endpoint import EndpointConfig
from trserve.config_values import parse_compat, parse_keys, parse_origins
from trserve.endpoint_plan import EndpointPlan, cautions, plan_endpoint
from trserve.errors import ConfigError
from trserve.keys import ADMIN_VARIABLE, API_VARIABLE, digest, new_key

SECRET = "sk-very-secret-1"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(API_VARIABLE, raising=False)
    monkeypatch.delenv(ADMIN_VARIABLE, raising=False)


def test_without_keys_anyone_may_ask_and_nobody_administer() -> None:
    assert plan_endpoint(EndpointConfig()) == EndpointPlan()


def test_keys_from_flags_files_and_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the team\n\nthird\nfourth\n")
    given = (*parse_keys("first, second"), *parse_keys(f"@{file}"))
    plan = plan_endpoint(EndpointConfig(api_key=given))
    assert plan.api_keys == tuple(map(digest, ("first", "second", "third", "fourth")))
    monkeypatch.setenv(API_VARIABLE, f"one,@{file}")
    monkeypatch.setenv(ADMIN_VARIABLE, "the-admin")
    plan = plan_endpoint(EndpointConfig())
    assert plan.api_keys == tuple(map(digest, ("one", "third", "fourth")))
    assert plan.admin_key == digest("the-admin")


def test_the_environment_forgets_the_keys_and_a_flag_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(API_VARIABLE, "from-environment")
    assert plan_endpoint(EndpointConfig(api_key=("flag",))).api_keys == (digest("flag"),)
    assert plan_endpoint(EndpointConfig()).api_keys == ()


@pytest.mark.parametrize("text", ["", ",", "a,,b", " "])
def test_an_empty_key_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="empty key"):
        parse_keys(text)
    monkeypatch.setenv(API_VARIABLE, text)
    with pytest.raises(ConfigError, match=f"{API_VARIABLE}: an empty key"):
        plan_endpoint(EndpointConfig())


def test_weak_combinations_are_refused_without_showing_a_key(tmp_path: Path) -> None:
    empty = tmp_path / "none"
    empty.write_text("# nothing\n")
    two = tmp_path / "two"
    two.write_text("a\nb\n")
    for config, match in (
        (EndpointConfig(api_key=(SECRET,), admin_key=SECRET), "one of the API keys"),
        (EndpointConfig(api_key=(f"{SECRET} x",)), "--api-key: a key has letters"),
        (EndpointConfig(api_key=(f"{SECRET}é",)), "--api-key: a key has letters"),
        (EndpointConfig(api_key=(f"@{empty}",)), "holds no key"),
        (EndpointConfig(api_key=(f"@{tmp_path}/absent",)), "No such file"),
        (EndpointConfig(admin_key=f"@{two}"), "several"),
    ):
        with pytest.raises(ConfigError, match=match) as caught:
            plan_endpoint(config)
        assert SECRET not in str(caught.value)


def test_a_plan_holds_no_key() -> None:
    plan = plan_endpoint(EndpointConfig(api_key=(SECRET,), admin_key="another-secret"))
    for text in (repr(plan), msgspec.json.encode(plan).decode()):
        assert SECRET not in text and "another-secret" not in text


def test_a_new_key_is_another_each_time_and_can_be_used() -> None:
    runner = CliRunner()
    keys = {runner.invoke(main, ["keys", "new"]).stdout.strip() for _ in range(3)}
    assert len(keys) == 3
    for key in keys:
        assert len(key) > 40
        assert plan_endpoint(EndpointConfig(api_key=(key,))).api_keys == (digest(key),)
    assert new_key() not in keys


@pytest.mark.parametrize(
    ("setting", "flag"),
    [
        ({"max_queue": -1}, "--max-queue"),
        ({"tokens_per_minute": -5}, "--tokens-per-minute"),
        ({"max_requests_per_key": -1}, "--max-requests-per-key"),
        ({"header_timeout_s": float("inf")}, "--header-timeout-s"),
        ({"body_timeout_s": float("nan")}, "--body-timeout-s"),
        ({"sse_keep_alive_s": -0.5}, "--sse-keep-alive-s"),
        ({"port": 65536}, "--port"),
    ],
    ids=str,
)
def test_a_setting_out_of_range_is_named(setting: dict[str, float], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        config_from_flags(setting)


def test_origins_and_compatible_names() -> None:
    assert parse_origins('["https://a.example/", "HTTP://B"]') == ("https://a.example", "http://b")
    assert parse_origins("*") == ("*",)
    assert parse_origins("") == ()
    for wrong in ("a.example", "[1", "ftp://x"):
        with pytest.raises(ValueError, match=r"origin|JSON"):
            parse_origins(wrong)
    assert parse_compat("vLLM,sglang") == ("vllm", "sglang")
    with pytest.raises(ValueError, match="tgi"):
        parse_compat("tgi")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, []),
        ({"host": "::1"}, []),
        ({"host": "0.0.0.0"}, ["anyone who can reach 0.0.0.0"]),
        ({"host": "0.0.0.0", "api_key": ("@FILE",)}, []),
        ({"api_key": (SECRET,)}, ["list of processes"]),
        ({"admin_key": SECRET}, ["list of processes"]),
    ],
    ids=str,
)
def test_what_a_person_is_told(tmp_path: Path, settings: dict[str, Any], says: list[str]) -> None:
    file = tmp_path / "keys"
    file.write_text(SECRET)
    given = {k: (f"@{file}",) if v == ("@FILE",) else v for k, v in settings.items()}
    config = EndpointConfig(**given)
    found = cautions(config, plan_endpoint(config))
    assert len(found) == len(says)
    for line, part in zip(found, says, strict=True):
        assert part in line and SECRET not in line
