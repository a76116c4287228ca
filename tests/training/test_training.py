"""Training finds a signal that was planted, and leaves files that the server's routers read."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.router_lib import networks as formulas
from tests.training.rows import HIDDEN, VOCAB, planted
from trserve.errors import ConfigError
from trserve.router_lib.checkpoints import read_checkpoint
from trserve.router_lib.co_llm import defer_probability, read_vector
from trserve.router_lib.confidence import ConfidenceNetwork
from trserve.router_lib.r2r_network import R2RNetwork
from trserve.training.co_llm import train_co_llm
from trserve.training.dataset import Dataset
from trserve.training.fit import Recipe, Setting
from trserve.training.mlp import train_mlp
from trserve.training.networks import R2R_CLASS
from trserve.training.r2r import Shape, train_r2r
from trserve.training.report import Trained, write

ROUTERS = ("r2r", "confidence", "co-llm")
STEPS = {"r2r": 80, "co-llm": 200, "confidence": 600}


def embedding() -> torch.Tensor:
    return torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1))


def trained(router: str, rows: Dataset, seed: int = 0, lines: list[str] | None = None) -> Trained:
    say = [].append if lines is None else lines.append
    recipe = Recipe(steps=STEPS[router], batch=256, rate=3e-3, seed=seed)
    setting = Setting(recipe, held_out=0.2, say=say)
    if router == "r2r":
        return train_r2r(rows, rows.differs, embedding(), Shape((16, 12), expansion=2), setting)
    if router == "co-llm":
        return train_co_llm(rows, setting)
    return train_mlp("confidence", rows, 1 - rows.differs, setting)


@pytest.fixture(scope="module")
def rows() -> Dataset:
    return planted()


@pytest.mark.parametrize("router", ROUTERS)
def test_training_finds_what_was_planted(router: str, rows: Dataset) -> None:
    lines: list[str] = []
    found = trained(router, rows, lines=lines)
    # One vector without a bias cannot say "above 1"; it can order the rows.
    assert found.held.average_precision() > (0.8 if router == "co-llm" else 0.95)
    assert found.chosen.recall >= 0.95 or router == "co-llm"
    losses = [float(line.rpartition(" ")[2]) for line in lines[:10]]
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("router", ROUTERS)
def test_without_a_signal_there_is_none(router: str, rows: Dataset) -> None:
    """Guards the guard: what is measured on held-out rows cannot be learnt by heart."""
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(2))
    values = {name: getattr(rows, name) for name in rows.__dataclass_fields__}
    shuffled = Dataset(**{**values, "hidden": rows.hidden[order]})
    base = float(rows.differs.mean())
    assert trained(router, shuffled).held.average_precision() < base + 0.15


@pytest.mark.parametrize("router", ROUTERS)
def test_the_same_seed_gives_the_same_bytes(router: str, rows: Dataset, tmp_path: Path) -> None:
    digests = []
    for name, seed in (("one", 0), ("two", 0), ("other", 1)):
        found = trained(router, rows, seed)
        write(found, tmp_path / name)
        content = (tmp_path / name / found.file).read_bytes()
        digests.append(hashlib.sha256(content).hexdigest())
    assert digests[0] == digests[1] != digests[2]


def test_a_write_that_fails_is_one_message(rows: Dataset, tmp_path: Path) -> None:
    found = trained("co-llm", rows)
    (tmp_path / found.file).mkdir()
    with pytest.raises(ConfigError, match=rf"--out {tmp_path}: cannot be written: .*directory"):
        write(found, tmp_path)


def served(found: Trained, folder: Path) -> Any:
    """What the router computes that the file is loaded into, on float32 rows."""
    write(found, folder)
    path = folder / found.file
    if found.router == "co-llm":
        vector = read_vector(path, VOCAB)
        return lambda result: defer_probability(result, vector)
    checkpoint = read_checkpoint(path, state_dict="state_dict")
    if found.router != "r2r":
        return ConfidenceNetwork(checkpoint)
    assert checkpoint.facts["model_type"] == R2R_CLASS
    assert checkpoint.facts["threshold"] == found.chosen.threshold
    table = embedding()
    network = R2RNetwork(checkpoint, R2R_CLASS, normalize=False, embedding=lambda hidden: table)
    return lambda result: network(result, VOCAB)


@pytest.mark.parametrize("router", ROUTERS)
def test_files_load_and_compute_the_published_formula(
    router: str, rows: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formulas, "TOP", rows.top_logits.shape[1])
    found = trained(router, rows)
    network, tensors = served(found, tmp_path), load_file(tmp_path / found.file)
    hidden = rows.hidden[:6].float()
    # Of a vocabulary in which the recorded logits are the largest.
    rest = torch.full((6, VOCAB - rows.top_logits.shape[1]), -30.0)
    logits, tokens = torch.cat([rest, rows.top_logits[:6]], -1), rows.tokens[:6]
    result: Any = SimpleNamespace(hidden=hidden, logits=logits, token_ids=tokens)
    if router == "r2r":
        expected = [
            formulas.r2r_probability(R2R_CLASS, tensors, h, int(t), z, embedding())
            for h, t, z in zip(hidden, tokens, logits, strict=True)
        ]
    elif router == "co-llm":
        expected = [formulas.defer_probability(tensors["vector"], h) for h in hidden]
    else:
        expected = [formulas.confidence_probability(tensors, h) for h in hidden]
    assert network(result).tolist() == pytest.approx(expected, abs=1e-5)
