"""Routers by name, their parameters, and the signal and rule of R-Stitch."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trserve.errors import ConfigError
from trserve.router_lib.base import BaseRouter, RouterContext, StepResult
from trserve.router_lib.none import NoRouter
from trserve.router_lib.parameters import Parameter, check_values
from trserve.router_lib.r_stitch import RStitch
from trserve.router_lib.registry import BUILTIN, describe, load_router_class
from trserve.router_lib.signals import normalized_entropy

TAU = Parameter("tau", "a bound", default=0.03, minimum=0.0, maximum=1.0)


def context(model: int, models: int = 2, size: int = 8) -> RouterContext:
    names = tuple(f"m{n}" for n in range(models))
    return RouterContext(model=model, models=names, tokenizer_size=size, config={"tau": 0.03})


def result(
    logits: torch.Tensor, tau: float | list[float] = 0.03, hysteresis: float = 0.0
) -> StepResult:
    rows = len(logits)
    taus = [tau] * rows if isinstance(tau, float) else tau
    return StepResult(
        logits=logits,
        hidden=torch.zeros(rows, 1),
        token_ids=torch.zeros(rows, dtype=torch.long),
        params={"tau": torch.tensor(taus), "hysteresis": torch.full((rows,), hysteresis)},
        requests=[None] * rows,  # type: ignore[list-item]
        is_prefill=torch.zeros(rows, dtype=torch.bool),
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, True, "0.3", None, [0.3], -0.01, 1.01])
def test_a_value_that_cannot_be_taken_is_said(value: object) -> None:
    assert "tau" in (TAU.problem(value) or "")
    assert "tau" in (check_values({"tau": value}, "r-stitch", [TAU]) or "")


@pytest.mark.parametrize("value", [0, 1, 0.0, 1.0, 0.03])
def test_bounds_are_inclusive(value: float) -> None:
    assert TAU.problem(value) is None


def test_an_unknown_parameter_is_met_with_the_known_ones() -> None:
    problem = check_values({"eta": 0.5}, "r-stitch", [TAU])
    assert problem is not None
    assert "'eta'" in problem and "tau" in problem
    assert "none" in (check_values({"eta": 0.5}, "none", []) or "")


@pytest.mark.parametrize("name", BUILTIN)
def test_every_registered_router_can_be_loaded(name: str) -> None:
    entry = describe(name)
    assert entry is not None
    loaded = load_router_class(name)
    assert issubclass(loaded, BaseRouter)
    assert tuple(loaded.parameters) == entry.parameters
    assert all(parameter.help for parameter in entry.parameters)


def test_an_installed_package_can_name_a_router(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "theirs-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    points = "[trserve.routers]\ntheirs = trserve.router_lib.none:NoRouter\n"
    (installed / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert describe("theirs") is None
    assert load_router_class("theirs") is NoRouter


@pytest.mark.parametrize(
    "name", ["r2r-typo", "os:path", "trserve.router_lib.none:Nothing", "no.such:Router", "os:"]
)
def test_what_is_no_router_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match="--router"):
        load_router_class(name)


@pytest.mark.parametrize("models", [2, 3, 5])
def test_peers_are_the_others_in_order(models: int) -> None:
    for model in range(models):
        router = NoRouter(context(model, models))
        assert router.peers == tuple(m for m in range(models) if m != model)
        for peer in router.peers:
            assert router.peers[router.peer(peer) - 1] == peer
        with pytest.raises(ValueError):
            router.peer(model)


@pytest.mark.parametrize(("model", "kept"), [(0, False), (1, True), (2, True)])
def test_by_default_the_first_models_token_does_not_count(model: int, kept: bool) -> None:
    request: Any = SimpleNamespace(
        rid=4, token_ids=np.arange(6, dtype=np.int32), committed_len=5, extras=b""
    )
    peer_req = NoRouter(context(model, 3)).send(request, 5)
    assert peer_req.keep_token is kept
    assert (peer_req.rid, peer_req.loc, peer_req.token_ids.tolist()) == (4, 5, [0, 1, 2, 3, 4])
    assert NoRouter(context(model, 3)).admit(request) == model


def test_no_router_never_routes() -> None:
    assert NoRouter(context(0)).route(result(torch.randn(3, 8))) == [0, 0, 0]


@given(st.lists(st.floats(-20, 20), min_size=2, max_size=12), st.integers(0, 5))
def test_entropy_is_that_of_the_formula_whatever_the_padding(
    row: list[float], padding: int
) -> None:
    size = len(row)
    p = np.exp(np.array(row, np.float64) - max(row))
    p /= p.sum()
    expected = -(p * np.log(p)).sum() / math.log(size)
    logits = torch.full((1, size + padding), -math.inf)
    logits[0, :size] = torch.tensor(row)
    assert normalized_entropy(logits, size).item() == pytest.approx(expected, abs=1e-4)


def test_entropy_is_one_for_all_alike_and_zero_for_one_alone() -> None:
    logits = torch.tensor([[0.0] * 8, [100.0] + [0.0] * 7, [math.nan] * 8])
    found = normalized_entropy(logits, 8).tolist()
    assert found[0] == pytest.approx(1.0)
    assert found[1] == pytest.approx(0.0, abs=1e-6)
    assert math.isnan(found[2])


def test_r_stitch_leaves_the_small_model_when_uncertain_and_the_large_when_confident() -> None:
    logits = torch.tensor([[0.0] * 8, [100.0] + [0.0] * 7])  # uncertain, confident
    assert RStitch(context(0)).route(result(logits)).tolist() == [1, 0]
    assert RStitch(context(1)).route(result(logits)).tolist() == [0, 1]


def test_r_stitch_takes_each_requests_own_tau() -> None:
    logits = torch.tensor([[2.0] + [0.0] * 7] * 3)
    entropy = normalized_entropy(logits, 8)[0].item()
    taus = [entropy - 0.01, entropy + 0.01, 1.0]
    assert RStitch(context(0)).route(result(logits, taus)).tolist() == [1, 0, 0]
    assert RStitch(context(1)).route(result(logits, taus)).tolist() == [0, 1, 1]


def test_r_stitch_with_hysteresis_returns_later_and_leaves_as_before() -> None:
    logits = torch.tensor([[2.0] + [0.0] * 7])
    entropy = normalized_entropy(logits, 8).item()
    for hysteresis, returns in ((0.0, 1), (0.05, 1), (0.15, 0)):
        asked = result(logits, entropy + 0.1, hysteresis)
        assert RStitch(context(0)).route(asked).tolist() == [0]
        assert RStitch(context(1)).route(asked).tolist() == [returns]


def test_r_stitch_at_its_threshold_is_confident() -> None:
    """Routed where H > tau; the large model returns where H <= tau."""
    logits = torch.zeros(1, 8)
    tau = normalized_entropy(logits, 8).item()
    assert RStitch(context(0)).route(result(logits, [tau])).tolist() == [0]
    assert RStitch(context(1)).route(result(logits, [tau])).tolist() == [1]
