"""The configuration tree and its flags: spelled once, safe as YAML, wrong values named."""

from __future__ import annotations

from dataclasses import Field, fields
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from trserve.cli import main
from trserve.config import (
    GROUPS,
    LaunchConfig,
    config_from_flags,
    flag_name,
)
from trserve.config_endpoint import EndpointConfig
from trserve.config_values import (
    parse_assignments,
    parse_buckets,
    parse_bytes,
    parse_counts,
    parse_names,
)
from trserve.endpoint_plan import plan_endpoint
from trserve.errors import ConfigError

SETTINGS = [setting for group in GROUPS.values() for setting in fields(group)]
LAUNCH = main.commands["launch"]
PLAIN = (str, int, float, bool, type(None))


def option_of(setting: Field[Any]) -> click.Parameter:
    return next(p for p in LAUNCH.params if p.name == setting.name)


def test_every_group_of_the_tree_has_flags() -> None:
    assert {f.name for f in fields(LaunchConfig)} == set(GROUPS)
    assert len({setting.name for setting in SETTINGS}) == len(SETTINGS)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_every_field_has_its_flag_and_says_what_it_is(setting: Field[Any]) -> None:
    option = option_of(setting)
    assert flag_name(setting) in option.opts
    assert set(setting.metadata["also"]) <= set(option.opts)
    assert set(setting.metadata["off"]) <= set(option.secondary_opts)
    assert setting.metadata["help"].endswith((".", "]"))


def test_no_two_flags_have_one_spelling() -> None:
    spellings = [opt for p in LAUNCH.params for opt in (*p.opts, *p.secondary_opts)]
    assert len(spellings) == len(set(spellings))


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_defaults_can_be_written_as_yaml(setting: Field[Any]) -> None:
    default = setting.default
    values = default if isinstance(default, tuple) else (default,)
    assert all(isinstance(value, PLAIN) for value in values)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_defaults_are_allowed_values(setting: Field[Any]) -> None:
    if choices := setting.metadata["choices"]:
        assert setting.default in choices


def test_nothing_given_is_the_default() -> None:
    assert config_from_flags({}) == LaunchConfig()


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], True),
        (["--enable-prefix-caching"], True),
        (["--no-enable-prefix-caching"], False),
        (["--disable-radix-cache"], False),
    ],
)
def test_a_switch_can_be_turned_off(
    flags: list[str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[LaunchConfig] = []
    monkeypatch.setattr("trserve.launch.launch", lambda config: seen.append(config) or 0)
    assert CliRunner().invoke(main, ["launch", *flags]).exit_code == 0
    assert seen[0].engine.enable_prefix_caching is expected


def test_the_tree_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        LaunchConfig().endpoint.port = 1  # type: ignore[misc]


WRONG = {
    "--max-num-seqs": {"max_num_seqs": 0},
    "--max-num-batched-tokens": {"max_num_batched_tokens": 0},
    "--max-requests": {"max_requests": -1},
    "--block-size": {"block_size": 0},
    "--max-model-len": {"max_model_len": -5},
    "--port": {"port": 65536},
    "--threads": {"threads": (1, 1, 1)},
    "--drain-timeout": {"drain_timeout": -1.0},
    "--watchdog-s": {"watchdog_s": 1.9},
}
ALSO_WRONG = [
    ("--drain-timeout", {"drain_timeout": float("nan")}),
    ("--drain-timeout", {"drain_timeout": float("inf")}),
    ("--watchdog-s", {"watchdog_s": -30.0}),
    ("--watchdog-s", {"watchdog_s": float("nan")}),
    ("--port", {"port": -1}),
    ("--max-num-batched-tokens", {"max_num_batched_tokens": 63, "max_num_seqs": 64}),
]


@pytest.mark.parametrize(("flag", "values"), [*WRONG.items(), *ALSO_WRONG])
def test_a_wrong_value_is_refused_by_its_flag(flag: str, values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=flag) as refused:
        config_from_flags(values)
    assert refused.value.exit_code == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["--port", "eighty"],
        ["--memory", "much"],
        ["--on-peer-loss", "panic"],
        ["--memory", "inf"],
        ["--memory", "-1g"],
        ["--threads", "1,x"],
        ["--threads", "0"],
        ["--device", "tpu"],
        ["--router-config", "tau"],
        ["--router-config", "=1"],
        ["--models", "a,,b"],
        ["--no-such-flag"],
        ["--max-num-seqs", "0"],
        ["--request-buckets-s", "1,0.5"],
        ["--token-buckets-s", "fast"],
    ],
)
def test_the_command_ends_with_2_and_names_the_flag(arguments: list[str]) -> None:
    done = CliRunner().invoke(main, ["launch", *arguments])
    assert done.exit_code == 2
    assert arguments[0] in done.output
    assert "Traceback" not in done.output


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2g", 2**31),
        ("512m", 2**29),
        ("1K", 1024),
        ("1.5g", 3 * 2**29),
        ("77", 77),
        ("2GiB", 2**31),
    ],
)
def test_sizes(text: str, value: int) -> None:
    assert parse_bytes(text) == value


@given(st.text(max_size=6))
def test_a_size_is_positive_or_refused(text: str) -> None:
    try:
        assert parse_bytes(text) > 0
    except ValueError as error:
        assert str(error)


def test_bounds_of_histograms() -> None:
    assert parse_buckets("0.0001, 0.5,2") == (0.0001, 0.5, 2.0)
    many = ",".join(map(str, range(1, 102)))
    for text in ("", "a", "1,1", "2,1", "0,1", "-1", "nan", "1,inf", many):
        with pytest.raises(ValueError):
            parse_buckets(text)


def test_a_chat_template_is_a_text_or_a_file(tmp_path: Path) -> None:
    text = "{{ messages }}"
    (tmp_path / "own.jinja").write_text(text)
    for flag in (text, str(tmp_path / "own.jinja")):
        assert plan_endpoint(EndpointConfig(chat_template=flag)).chat_template == text
    assert plan_endpoint(EndpointConfig()).chat_template is None
    with pytest.raises(ConfigError, match="--chat-template"):
        plan_endpoint(EndpointConfig(chat_template=str(tmp_path / "none.jinja")))


def test_lists() -> None:
    assert parse_names("a, b") == ("a", "b")
    assert parse_counts("1,2") == (1, 2)
    assert parse_assignments("tau=0.3, w = 1/2") == (("tau", "0.3"), ("w", "1/2"))
    for parse, text in ((parse_names, "a,"), (parse_counts, ""), (parse_assignments, "a=")):
        with pytest.raises(ValueError):
            parse(text)
