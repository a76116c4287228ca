"""Flags, environment, file, defaults: who wins, what is unknown, and where a value came from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from trserve.cli import main
from trserve.config import LaunchConfig
from trserve.config_sources import SETTINGS, gather, variable
from trserve.errors import ConfigError


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "server.yaml"
    path.write_text(text)
    return path


def test_flag_over_environment_over_file_over_default(tmp_path):
    file = write(tmp_path, "port: 1\nmax-queue: 2\nmax_requests: 3\n")
    environment = {"TRSERVE_PORT": "4", "TRSERVE_MAX_QUEUE": "5"}
    settings = gather({"port": 6}, file, environment)
    config = settings.config()
    assert config.endpoint.port == 6
    assert config.endpoint.max_queue == 5
    assert config.engine.max_requests == 3
    assert config.endpoint.host == "127.0.0.1"
    assert settings.origins["port"] == "flag --port"
    assert settings.origins["max_queue"] == "environment TRSERVE_MAX_QUEUE"
    assert settings.origins["max_requests"] == f"file {file}"
    assert settings.origins["host"] == "default"


def test_a_file_says_what_flags_say(tmp_path):
    text = """
models: [tiny, small]
router: r-stitch
router-config: {tau: 0.25, hysteresis: 0.1}
scheduling:
  early-prefill: off
  batch_threshold: [1, 3]
engine:
  memory: 64m
  disable-radix-cache: true
endpoint:
  api-key: [first, second]
  request-buckets-s: [0.1, 1]
  log-requests: no
recording:
"""
    config = gather({}, write(tmp_path, text), {}).config()
    assert config.model.models == ("tiny", "small")
    assert config.router.router_config == (("tau", "0.25"), ("hysteresis", "0.1"))
    assert config.scheduling.early_prefill == "off"
    assert config.scheduling.batch_threshold == (1, 3)
    assert config.engine.memory == 64 * 2**20
    assert config.engine.enable_prefix_caching is False
    assert config.endpoint.api_key == ("first", "second")
    assert config.endpoint.request_buckets_s == (0.1, 1.0)
    assert config.endpoint.log_requests is False


def test_weights_of_me_are_a_list_in_a_mapping(tmp_path):
    config = gather({}, write(tmp_path, "router-config: {weights: [0.5, 0.5]}"), {}).config()
    assert config.router.router_config == (("weights", "0.5/0.5"),)


def test_an_empty_file_is_the_default(tmp_path):
    assert gather({}, write(tmp_path, "# nothing yet\n"), {}).config() == LaunchConfig()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("prot: 1", "did you mean port"),
        ("endpoint: {max-queu: 1}", "did you mean max_queue"),
        ("unheard-of: 1", "trserve config show"),
        ("port: eighty", "'eighty' is no whole number"),
        ("device: tpu", "none of: auto, cpu"),
        ("log-requests: perhaps", "neither true nor false"),
        ("max-queue: 1\nmax_queue: 2", "same setting"),
        ("models: tiny\nmodel-path: small", "same setting"),
        ("router-config: {a: {b: 1}}", "too deep"),
        ("- a\n- b", "expected settings"),
        ("a: [", "no YAML"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(tmp_path, text, expected):
    file = write(tmp_path, text)
    with pytest.raises(ConfigError, match=expected) as refused:
        gather({}, file, {})
    assert str(file) in str(refused.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match=r"--config .*gone\.yaml"):
        gather({}, tmp_path / "gone.yaml", {})


def test_the_environment_may_name_the_file(tmp_path):
    file = write(tmp_path, "port: 77")
    assert gather({}, None, {"TRSERVE_CONFIG": str(file)}).config().endpoint.port == 77


@pytest.mark.parametrize("port", ["tcp://10.0.0.1:8000", "udp://[fd00::1]:8000"])
def test_what_kubernetes_injects_is_no_setting(port):
    injected = {
        "TRSERVE_PORT": port,
        "TRSERVE_SERVICE_HOST": "10.0.0.1",
        "TRSERVE_SERVICE_PORT": "8000",
        "TRSERVE_SERVICE_PORT_HTTP": "8000",
        "TRSERVE_PORT_8000_TCP": port,
        "TRSERVE_PORT_8000_TCP_ADDR": "10.0.0.1",
        "TRSERVE_PORT_8000_TCP_PROTO": "tcp",
    }
    settings = gather({}, None, injected)
    assert settings.config() == LaunchConfig()
    assert settings.notes == ()
    assert settings.origins["port"] == "default"


def test_a_variable_that_is_nearly_a_setting_is_told(tmp_path):
    (note,) = gather({}, None, {"TRSERVE_MAX_QUEU": "3", "TRSERVE_UNRELATED": "x"}).notes
    assert "TRSERVE_MAX_QUEU " in note
    assert "TRSERVE_MAX_QUEUE" in note


def test_keys_in_the_environment_are_left_to_their_reader(tmp_path):
    file = write(tmp_path, "api-key: of-the-file")
    settings = gather({}, file, {"TRSERVE_API_KEY": "secret"})
    assert settings.config().endpoint.api_key == ()
    assert settings.origins["api_key"] == "environment TRSERVE_API_KEY"


@pytest.mark.parametrize(
    ("environment", "text", "origin"),
    [
        ({"TRSERVE_MAX_QUEUE": "-1"}, "", "environment TRSERVE_MAX_QUEUE"),
        ({}, "max-queue: -1", "server.yaml"),
    ],
)
def test_a_value_out_of_range_tells_where_it_came_from(tmp_path, environment, text, origin):
    settings = gather({}, write(tmp_path, text), environment)
    with pytest.raises(ConfigError, match="--max-queue") as refused:
        settings.config()
    assert origin in str(refused.value)


def texts(setting: Any) -> str:
    default = setting.default
    if isinstance(default, bool):
        return "true" if default else "false"
    return ",".join(map(str, default)) if isinstance(default, tuple) else str(default)


# The default of --memory is what is free, which is no size.
SAYABLE = [name for name in SETTINGS if name != "memory" and texts(SETTINGS[name])]


@pytest.mark.parametrize("name", SAYABLE)
def test_every_default_can_be_said_in_the_environment(name):
    settings = gather({}, None, {variable(name): texts(SETTINGS[name])})
    assert settings.config() == LaunchConfig()
    assert settings.origins[name] == f"environment {variable(name)}"


def test_launch_reads_both(tmp_path, monkeypatch):
    seen: list[LaunchConfig] = []
    monkeypatch.setattr("trserve.launch.launch", lambda config: seen.append(config) or 0)
    monkeypatch.setenv("TRSERVE_PORT", "tcp://10.0.0.1:8000")
    monkeypatch.setenv("TRSERVE_MAX_QUEUE", "9")
    file = write(tmp_path, "max-requests: 7")
    done = CliRunner().invoke(main, ["launch", "--config", str(file)])
    assert done.exit_code == 0, done.output
    assert (seen[0].endpoint.port, seen[0].endpoint.max_queue) == (8000, 9)
    assert seen[0].engine.max_requests == 7


def test_launch_refuses_an_unknown_key(tmp_path):
    done = CliRunner().invoke(main, ["launch", "--config", str(write(tmp_path, "modles: a"))])
    assert done.exit_code == 2
    assert "did you mean models" in done.output
    assert "Traceback" not in done.output
