"""Launch scripts of other servers: what they write is understood, or refused with what to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from trserve.cli import main
from trserve.config_values import parse_length
from trserve.launch_options import launch_options
from trserve.launch_scripts import ALWAYS, INSTEAD, ForeignFlagError, translate

NAMES = ("tiny", "small")


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The configurations that were launched."""
    import trserve.launch

    found: list[Any] = []
    monkeypatch.setattr(trserve.launch, "launch", lambda config: found.append(config) or 0)
    return found


def launched(config: list[Any], *words: str) -> Any:
    result = CliRunner().invoke(main, ["launch", *words])
    assert result.exit_code == 0, result.output
    return config.pop()


def refused(*words: str) -> str:
    result = CliRunner().invoke(main, ["launch", *words])
    assert result.exit_code == 2
    return result.output


@pytest.mark.parametrize(
    ("words", "group", "name", "value"),
    [
        ("tiny small", "model", "models", ("tiny", "small")),
        ("tiny,small --port 0", "model", "models", ("tiny", "small")),
        ("--model-path tiny", "model", "models", ("tiny",)),
        ("--max-model-len 1k", "model", "max_model_len", 1000),
        ("--max-model-len 1K", "model", "max_model_len", 1024),
        ("--max-model-len auto", "model", "max_model_len", 0),
        ("--tokenizer-path x", "model", "tokenizer", "x"),
        ("-tp 1,1", "placement", "tp", (1, 1)),
        ("--tp-size 1,1", "placement", "tp", (1, 1)),
        ("-dp 1", "hosts", "replicas", 1),
        ("--dp-size 1", "hosts", "replicas", 1),
        ("--enforce-eager", "placement", "enforce_eager", True),
        ("--disable-cuda-graph", "placement", "enforce_eager", True),
        ("--max-prefill-tokens 512", "engine", "max_num_batched_tokens", 512),
        ("--gpu-memory-utilization 0.5", "engine", "gpu_memory_utilization", 0.5),
        ("--mem-fraction-static .8", "engine", "mem_fraction_static", 0.8),
        ("--log-level WARNING", "endpoint", "log_level", "warning"),
        ("--served-model-name a b", "endpoint", "served_model_name", ("a", "b")),
        ("--api-key k1 k2 --port 0", "endpoint", "api_key", ("k1", "k2")),
        ("tiny --api-key k1", "endpoint", "api_key", ("k1",)),
    ],
)
def test_the_flag_means_what_it_means_there(
    config: list[Any], words: str, group: str, name: str, value: Any
) -> None:
    assert getattr(getattr(launched(config, *words.split()), group), name) == value


@pytest.mark.parametrize("flag", sorted(ALWAYS))
def test_what_is_so_anyway_is_taken(config: list[Any], flag: str) -> None:
    assert launched(config, flag, "--port", "0").endpoint.port == 0


@pytest.mark.parametrize("flag", sorted(INSTEAD))
def test_what_has_no_counterpart_says_what_to_do(flag: str) -> None:
    assert INSTEAD[flag] in " ".join(refused(flag, "1").split())


def test_nothing_is_both_a_flag_and_foreign() -> None:
    own = {word for option in launch_options() for word in (*option.opts, *option.secondary_opts)}
    assert not own & (ALWAYS | set(INSTEAD))


@pytest.mark.parametrize("words", ["--api-key k tiny", "--api-key k tiny,small", "--api-key k a/b"])
def test_a_model_does_not_become_a_key(words: str) -> None:
    assert "models stand before the flags" in refused(*words.split())


def test_models_are_named_once() -> None:
    assert "named twice" in refused("tiny", "--models", "small")
    assert "named twice" in refused("tiny", "--model=small")


@pytest.mark.parametrize("flag", ["--gpu-memory-utilization", "--mem-fraction-static"])
@pytest.mark.parametrize("share", ["1.5", "-0.1", "nan"])
def test_a_share_is_one(flag: str, share: str) -> None:
    assert f"{flag} {share}: must be a share" in refused(flag, share)


def test_a_mistyped_flag_is_refused() -> None:
    assert "No such option" in refused("--tensor-paralel-size", "2")


def test_what_is_trserves_own_stays_as_it_is() -> None:
    words = ["--router-config", "tau=1", "--api-key", "@file", "--no-ui", "--api-key=k"]
    assert translate(words) == words
    assert translate([]) == []
    with pytest.raises(ForeignFlagError):
        translate(["--served-model-name", "a", "tiny"], NAMES)


@pytest.mark.parametrize("text", ["", "k", "8x", "1e999k", "eight"])
def test_what_is_no_length_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="number of tokens"):
        parse_length(text)


def test_another_tokenizer_is_taken_for_all_models(tmp_path: Path) -> None:
    from trserve.config import config_from_flags
    from trserve.errors import ModelUnavailableError
    from trserve.models.aliases import resolve_model
    from trserve.plan import make_plan

    plan = make_plan(config_from_flags({"models": ("tiny", "small"), "tokenizer": "small"}))
    assert plan.tokenizer_path == str(resolve_model("small").tokenizer_path)
    with pytest.raises(ModelUnavailableError, match=r"--tokenizer .*no tokenizer\.json"):
        make_plan(config_from_flags({"tokenizer": str(tmp_path)}))


@pytest.mark.parametrize(("level", "shown"), [("warning", False), ("debug", True), ("info", True)])
def test_children_log_from_that_level_on(level: str, shown: bool) -> None:
    code = (
        "import logging, os\n"
        "from trserve.ipc.child import begin_child, parse_child_arguments\n"
        "words = f'--parent {os.getppid()} --launcher-fd 0 --control x --slab-fd 0 --bells 0 '\n"
        "words += '--index 0 --listen-fd -1'\n"
        "begin_child(parse_child_arguments(words.split()))\n"
        "logging.getLogger('x').info('a line')\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={"TRSERVE_LOG_LEVEL": level, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert found.returncode == 0, found.stderr
    assert ("a line" in found.stderr) == shown
