"""Profiles: what is read, what is refused, and that those that ship say where they are from."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.emulated.profiles import PAIR, changed, saved, text
from trserve.emulated.profile import (
    InvalidProfile,
    Profile,
    load_profile,
    parse_profile,
    shipped_profiles,
)
from trserve.errors import EXIT_USAGE
from trserve.models.aliases import HUB_ALIASES, alias_spec
from trserve.sched.system import interpolate

SHIPPED = {
    "a100-0.6b-8b",
    "a100-0.6b-32b",
    "a100-1.7b-8b",
    "a100-4b-8b",
    "a100-1.5b-32b",
    "a100-1.5b-72b",
    "a100-7b-70b",
    "a100-0.6b-8b-32b",
}
LINE = {"0.6b": 6.0, "32b": 27.9}
"""The published steps, on which the line of the derived ones lies."""
GPUS = {"32b": 2, "70b": 4, "72b": 4}
OTHERS = {"1.5b": (28, 1.544), "7b": (32, 6.738), "70b": (80, 68.977), "72b": (80, 72.706)}
"""Layers and billions of weights of models without an alias."""


def read(profile: Any) -> Profile:
    return parse_profile(text(profile), "mine.json")


def shape(name: str) -> tuple[int, float]:
    """Layers, and GB of bfloat16 weights a GPU."""
    layers, billions = OTHERS.get(name, (0, 0.0))
    if name in HUB_ALIASES:
        layers, billions = alias_spec(name).num_layers, alias_spec(name).num_parameters / 1e9
    return layers, 2 * billions / GPUS.get(name, 1)


def test_a_profile_says_what_it_says() -> None:
    profile = read(PAIR)
    assert profile.names == ("a", "b")
    assert profile.model("B") is profile.models[1] and profile.model("c") is None
    curve = profile.models[1].step.curve
    assert [interpolate(curve, width) for width in (1, 2, 8, 64)] == pytest.approx(
        [4.0, 4.0 + 2 / 7, 6.0, 6.0]
    )
    assert profile.models[0].step.curve == 2.0
    assert profile.models[0].prefill.free_tokens == 64
    assert profile.routing is not None and profile.routing.tokens == [[1, 0], [1, 0]]


@pytest.mark.parametrize(
    ("path", "value", "key"),
    [
        (["format"], 2, "format"),
        (["unknown"], 1, "unknown"),
        (["max_model_len"], 1, "max_model_len"),
        (["max_model_len"], 10**9, "max_model_len"),
        (["seed"], -1, "seed"),
        (["models"], [], "models"),
        (["models", 0, "name"], "B", r"models\[1\]\.name"),
        (["models", 0, "name"], "a,b", r"models\[0\]\.name"),
        (["models", 0, "step", "ms"], 0, r"models\[0\]\.step\.ms"),
        (["models", 0, "step", "ms"], -1.5, r"models\[0\]\.step\.ms"),
        (["models", 0, "step", "ms"], 1e9, r"models\[0\]\.step\.ms"),
        (["models", 1, "step", "ms"], {}, r"models\[1\]\.step\.ms"),
        (["models", 1, "step", "ms"], {"0": 1.0}, r"models\[1\]\.step\.ms"),
        (["models", 1, "step", "ms"], {"1.5": 1.0}, r"models\[1\]\.step\.ms"),
        (["models", 1, "step", "ms"], "fast", r"models\[1\]\.step\.ms"),
        (["models", 0, "prefill", "tokens_per_s"], 0, r"prefill\.tokens_per_s"),
        (["models", 0, "prefill", "free_tokens"], -1, r"prefill\.free_tokens"),
        (["models", 1, "agreement", "probability"], 1.5, r"agreement\.probability"),
        (["models", 1, "agreement"], None, r"models\[1\]\.agreement"),
        (["routing", "P"], [[0.5, 0.6], [1, 0]], r"routing\.P"),
        (["routing", "P"], [[1.0]], r"routing\.P"),
        (["routing", "P"], [[1.5, -0.5], [1, 0]], r"routing\.P"),
        (["routing", "C"], [[1, 0.5], [1, 1]], r"routing\.C"),
        (["routing", "C"], [[0, 1], [1, 1]], r"routing\.C"),
        (["routing", "C"], [[1, 0], [0, 1]], r"routing\.C.*\[0\]\[1\]"),
        (["routing"], {"P": [[1]]}, "C"),
    ],
)
def test_what_is_wrong_is_named(path: list[str | int], value: Any, key: str) -> None:
    with pytest.raises(InvalidProfile, match=rf"--profile mine\.json: .*{key}") as caught:
        read(changed(path, value))
    assert caught.value.exit_code == EXIT_USAGE and "\n" not in str(caught.value)


def paths(value: Any, at: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    inner = value.items() if isinstance(value, dict) else ()
    inner = enumerate(value) if isinstance(value, list) else inner
    return [p for key, each in inner for p in [(*at, key), *paths(each, (*at, key))]]


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@given(st.sampled_from(paths(PAIR)), ANYTHING)
def test_whatever_stands_there_is_taken_or_refused(path: Any, value: Any) -> None:
    """Anything anywhere: what is taken can be used, what is not is one clear error."""
    try:
        profile = read(changed(path, value))
    except InvalidProfile as error:
        assert str(error).startswith("--profile mine.json: ")
        return
    for model in profile.models:
        assert all(interpolate(model.step.curve, width) > 0 for width in (1, 3, 500))
        assert model.prefill.tokens_per_s > 0
    assert profile.routing is None or len(profile.routing.routing) == len(profile.models)


@given(st.binary(max_size=60))
def test_whatever_a_file_holds_is_refused(content: bytes) -> None:
    with pytest.raises(InvalidProfile, match="--profile junk: "):
        parse_profile(content, "junk")


def test_a_file_without_end_or_bottom_is_refused(tmp_path: Path) -> None:
    for content in (b"[" * 100_000, b" " * 2_000_000):
        file = tmp_path / "large.json"
        file.write_bytes(content)
        with pytest.raises(InvalidProfile, match=r"large\.json"):
            load_profile(str(file))


def test_a_name_that_is_neither_is_told_what_there_is(tmp_path: Path) -> None:
    for wanted in ("a100", str(tmp_path), str(tmp_path / "none.json")):
        with pytest.raises(InvalidProfile, match=rf"--profile {wanted}: .*a100-0\.6b-32b"):
            load_profile(wanted)
    assert load_profile(saved(tmp_path, PAIR)).name == "pair"


def test_the_pairs_and_the_triple_ship() -> None:
    assert set(shipped_profiles()) == SHIPPED


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_what_ships_says_where_each_number_is_from(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name == "a100-" + "-".join(profile.names)
    assert profile.routing is not None and profile.max_model_len >= 16384
    parts: list[Any] = [profile.routing]
    for model in profile.models:
        parts += [model.step, model.prefill]
    for part in parts:
        assert re.match("(published|derived|chosen): .{20}", part.source), part
    assert "Chosen: " in profile.description


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_what_ships_is_what_its_sources_say(name: str) -> None:
    """The line through both published steps, and half of a GPU's arithmetic."""
    (short, first), (long, last) = shape("0.6b"), shape("32b")
    per_gb = (LINE["32b"] - LINE["0.6b"] * long / short) / (last - first * long / short)
    per_layer = (LINE["0.6b"] - first * per_gb) / short
    for model in load_profile(name).models:
        layers, gb = shape(model.name)
        if model.step.source.startswith("published"):
            assert model.step.ms == LINE[model.name]
        elif isinstance(model.step.ms, float):
            assert model.step.ms == round(layers * per_layer + gb * per_gb, 1)
        else:
            rows = re.findall(
                r"N=(\d): ([\d.]+) tokens/s, TTFT ([\d.]+) s, latency ([\d.]+) s", model.step.source
            )
            assert {n: pytest.approx(ms) for n, ms in model.step.ms.items()} == {
                n: round(
                    1e3
                    * (float(latency) - float(ttft))
                    / (float(rate) / int(n) * float(latency) - 1),
                    1,
                )
                for n, rate, ttft, latency in rows
            }
        rate = 0.5 * 312e12 / (gb * 1e9)
        assert model.prefill.tokens_per_s == float(f"{rate:.2g}")


def test_the_form_that_is_documented_is_read() -> None:
    document = Path(__file__).parents[2] / "docs" / "emulated.md"
    (example,) = re.findall(r"```json[^\n]*\n(.*?)```", document.read_text(), re.S)
    assert read(json.loads(example)).names == ("small", "large")
