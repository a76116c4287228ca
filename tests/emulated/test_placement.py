"""From flags to a plan of emulated models, and what is refused before anything is taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest

from tests.emulated.profiles import PAIR, changed, saved
from trserve import banner
from trserve.config import config_from_flags
from trserve.errors import ConfigError
from trserve.plan import ServerPlan, make_plan
from trserve.router_lib.registry import BUILTIN


def plan(**flags: Any) -> ServerPlan:
    return make_plan(config_from_flags({"device": "emulated", **flags}))


def test_a_pair_finds_its_profile_by_its_names() -> None:
    made = plan(models=("0.6B", "32b"))
    assert made.device == "emulated" and made.router == "emulated"
    assert made.profile is not None and made.profile.name == "a100-0.6b-32b"
    assert [model.name for model in made.models] == ["0.6b", "32b"]
    assert made.router_config["routing"] == "0.65/0.35:1/0"
    assert [model.threads for model in made.models] == [1, 1]
    assert not made.own_tokenizer and made.tokenizer_size < 2000


def test_a_plan_survives_the_control_plane() -> None:
    made = plan(profile="a100-1.5b-32b")
    sent = orjson.loads(orjson.dumps(msgspec.to_builtins(made)))
    assert msgspec.convert(sent, ServerPlan) == made


def test_a_profile_names_its_models(tmp_path: Path) -> None:
    assert [m.name for m in plan(profile="a100-0.6b-8b-32b").models] == ["0.6b", "8b", "32b"]
    mine = plan(profile=saved(tmp_path, PAIR))
    assert [m.name for m in mine.models] == ["a", "b"]
    assert mine.row_tokens == 4096


@pytest.mark.parametrize("name", ["0.6b", "32b"])
def test_one_model_of_a_profile_serves_alone(name: str) -> None:
    made = plan(models=(name,), profile="a100-0.6b-32b")
    assert made.router == "none" and made.profile is not None
    assert made.profile.names == (name,) and made.profile.routing is not None
    assert made.profile.models[0].step.ms == {"0.6b": 6.0, "32b": 27.9}[name]


def test_kv_is_counted_and_takes_no_memory() -> None:
    """Enough for every slot at its longest, or what --kv-tokens says."""
    made = plan(models=("0.6b", "32b"), max_model_len=32768, max_requests=256)
    assert [m.num_blocks * made.block_size for m in made.models] == [32768 * 256] * 2
    made = plan(models=("0.6b", "32b"), kv_tokens=(4096, 1024))
    assert [m.num_blocks * made.block_size for m in made.models] == [4096, 1024]


def test_a_router_and_its_values_may_be_named() -> None:
    pair = {"models": ("0.6b", "32b")}
    for router in ("random", "me", "none", "step-leader", "entropy", "r-stitch"):
        assert plan(**pair, router=router).router == router
    made = plan(**pair, router_config=(("p", "0.1"),))
    assert (made.router, made.router_config["p"]) == ("emulated", 0.1)
    assert made.router_config["tokens"] == "1/0:1/1", "the profile's, under another p"
    own = (("algorithm", "r-stitch"), ("p", "0.1"), ("q", "0.8"))
    assert plan(**pair, router_config=own).router_config["routing"] == ""
    other = {"models": ("8b", "32b"), "profile": "a100-0.6b-8b-32b"}
    assert plan(**other, router_config=(("p", "0.1"),)).router == "emulated"
    assert plan(**other, router="none").router == "none"


def test_the_emulated_router_needs_no_emulated_device() -> None:
    made = make_plan(config_from_flags({"router": "emulated", "router_config": (("p", "0.2"),)}))
    assert (made.device, made.router, made.profile) == ("cpu", "emulated", None)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({}, r"--models none named: .*a100-0\.6b-32b \(0\.6b,32b\)"),
        ({"models": ("0.6b",)}, r"--models 0\.6b: no profile.*--profile"),
        ({"models": ("32b", "0.6b")}, r"--models 32b,0\.6b: no profile"),
        ({"models": ("0.6b", "9b"), "profile": "a100-0.6b-32b"}, r"--models 9b: .*0\.6b, 32b"),
        ({"profile": "a100-0.6b"}, r"--profile a100-0\.6b: neither"),
        ({"profile": "a100-0.6b-32b", "device": "cpu"}, r"--profile .*--device emulated"),
        ({"profile": "a100-0.6b-32b", "device": "auto"}, r"--profile .*--device emulated"),
        ({"models": ("0.6b", "32b"), "load_format": "dummy"}, r"--load-format: emulated"),
        ({"models": ("0.6b", "32b"), "dtype": "bfloat16"}, r"--dtype: emulated"),
        ({"models": ("0.6b", "32b"), "quantization": "int8"}, r"--quantization: emulated"),
        ({"models": ("0.6b", "32b"), "record": "somewhere"}, r"--record: emulated"),
        ({"models": ("0.6b", "32b"), "memory": 2**30}, r"--memory: emulated.*--kv-tokens"),
        ({"models": ("0.6b", "32b"), "max_model_len": 200_000}, r"--max-model-len 200000"),
        ({"profile": "a100-0.6b-8b-32b", "threads": (1, 1)}, r"--threads names 2.*0\.6b,8b,32b"),
        ({"profile": "a100-0.6b-8b-32b", "batch_threshold": (1, 1)}, r"--batch-threshold names 2"),
        ({"models": ("0.6b", "32b"), "tp": (1,)}, r"--tp names 1 numbers for .*0\.6b,32b"),
        ({"profile": "a100-0.6b-8b-32b", "tp": (1, 1)}, r"--tp names 2 .*0\.6b,8b,32b"),
        (
            {"models": ("0.6b", "32b"), "batch_threshold": (1, 1), "schedule": "model-sync"},
            r"--batch-threshold: means nothing with --schedule model-sync",
        ),
        ({"models": ("0.6b", "32b"), "router": "r2r"}, r"--router r2r: reads hidden states"),
        ({"models": ("0.6b", "32b"), "router_config": (("p", "2"),)}, r"--router-config: p"),
        ({"models": ("0.6b", "32b"), "router_config": (("tau", "1"),)}, r"'tau'"),
        (
            {"models": ("0.6b", "32b"), "router_config": (("algorithm", "r-stitch"),)},
            r"--router-config algorithm=r-stitch: needs p",
        ),
        (
            {"models": ("8b", "32b"), "profile": "a100-0.6b-8b-32b"},
            r"--profile a100-0\.6b-8b-32b: .*0\.6b,8b,32b, in this order",
        ),
    ],
)
def test_what_is_wrong_is_named(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(**flags)


def test_thresholds_count_the_profiles_models() -> None:
    made = plan(profile="a100-0.6b-8b-32b", batch_threshold=(1, 1, 2), threads=(1, 2, 1))
    assert made.batch_threshold == [1, 1, 2]
    assert [model.threads for model in made.models] == [1, 2, 1]


def test_a_profile_without_routing_needs_a_router(tmp_path: Path) -> None:
    mine = saved(tmp_path, changed(["routing"], None))
    with pytest.raises(ConfigError, match="says nothing of routing"):
        plan(profile=mine)
    assert plan(profile=mine, router_config=(("p", "0.5"),)).router == "emulated"
    assert plan(profile=mine, router="me").router == "me"


def test_the_banner_says_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    made = plan(profile="a100-1.5b-32b")
    banner.show_plan(made)
    banner.show_ready(made, "127.0.0.1", 80)
    said = capsys.readouterr()
    assert "EMULATED: no model computes anything here" in said.err
    for part in (
        "a100-1.5b-32b",
        "made up",
        "6.9 ms a step",
        "24.9 ms at 1, 27.5 ms at 4",
        "the embedded pair's",
        "Derived: ",
        '"max_tokens"',
    ):
        assert part in said.err
    for nothing in ("float32", "p=-1", "algorithm=", "kernels"):
        assert nothing not in said.err


def test_the_router_is_one_of_the_builtin_ones() -> None:
    assert BUILTIN["emulated"].min_models == 2 and BUILTIN["emulated"].max_models is None
