"""What is timed is every router of the library, and a share is taken of what it says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.router_cost import of_model, runner_of
from bench.router_subjects import NAMES, Shape
from bench.target_share import shares
from trserve.demo import model_path
from trserve.models.spec import read_spec
from trserve.router_lib.registry import BUILTIN


def test_every_router_has_a_row_at_each_batch(tmp_path: Path) -> None:
    assert {*NAMES, "none", "emulated"} == set(BUILTIN)
    path = model_path("tiny")
    runner = runner_of(read_spec(path), path, torch.float32)
    shape = Shape(path, runner.decoder.spec.hidden_size, 683, runner.decoder.embedding)
    with torch.inference_mode():
        rows = list(of_model("embedded", runner, shape, tmp_path, calls=3))
    assert [(row["router"], row["batch"]) for row in rows] == [
        (n, b) for n in NAMES for b in (1, 16)
    ]
    for row in rows:
        assert row["share"] == pytest.approx(row["route_us"] / row["step_us"])
        assert row["route_us"] > 0 and row["ok"] == (row["route_us"] <= 150)


def test_shares_are_taken_at_every_2000_tokens() -> None:
    counts = [(900, 100), (1900, 100), (1950, 100), (1900, 2100), (9000, 3000)]
    assert list(shares(counts)) == [(2000, 0.05), (4000, 0.525), (12_000, 0.25)]
