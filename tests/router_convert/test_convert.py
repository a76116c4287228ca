"""``trserve convert-router``: what is written decides as the official file does, and says more."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from tests.router_lib import networks
from tests.router_lib.test_learned import (  # noqa: F401  (model is a fixture)
    HIDDEN,
    PADDED,
    SIZE,
    deferring_folder,
    make,
    model,
    step,
)
from trserve.cli import main
from trserve.router_lib.co_llm import CoLLM
from trserve.router_lib.confidence import Citer, Confidence
from trserve.router_lib.r2r import R2R

CLASSES = networks.R2R_CLASSES


def convert(*args: object):
    return CliRunner().invoke(main, ["convert-router", *map(str, args)])


def converted(source: Path, out: Path, *args: object) -> str:
    run = convert(source, "-o", out, *args)
    assert run.exit_code == 0, run.output
    return run.stdout


def same(router, before: Path, after: Path, folder: Path, **config: float) -> None:
    ours, theirs = (make(router, path, folder, **config) for path in (before, after))
    # A mapped tensor begins elsewhere than a loaded one, and sums are taken in another order.
    assert torch.allclose(ours.score(step()), theirs.score(step()), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("vocab", [None, PADDED])
def test_r2r(tmp_path, model, name, normalize, vocab):  # noqa: F811
    tensors = networks.r2r_tensors(name, HIDDEN, vocab=vocab, normalize=normalize)
    source = tmp_path / "default_router.pt"
    torch.save(networks.r2r_file(name, tensors, threshold=0.4, normalize=normalize), source)
    for out in (tmp_path / "folder", tmp_path / "deep" / "one.safetensors"):
        said = converted(tmp_path, out)
        assert f"r2r, {name}" in said and "threshold 0.4" in said
        same(R2R, source, out, model, threshold=-1.0)
        assert make(R2R, out, model, threshold=-1.0).context.config["threshold"] == 0.4
    facts = json.loads((tmp_path / "folder" / "default_router.json").read_text())
    assert facts["model_type"] == name
    assert facts["router"] == "r2r"
    assert facts["init_args"]["pretrained_model_name"] == "somebody/some-model"
    if name != "LogitsClassifier":
        assert facts["hidden_size"] == HIDDEN, "of the tensors, not of the arguments"
    assert {file.name for file in (tmp_path / "folder").iterdir()} == {
        "default_router.json",
        "default_router.safetensors",
    }


def test_r2r_without_its_embedding(tmp_path, model):  # noqa: F811
    tensors = networks.r2r_tensors(CLASSES[0], HIDDEN, vocab=PADDED)
    source, out = tmp_path / "x_all.pt", tmp_path / "out.safetensors"
    torch.save(networks.r2r_file(CLASSES[0], tensors), source)
    converted(source, out, "--drop-embedding")
    assert set(load_file(out)) == set(tensors) - {"token_embeddings.weight"}
    del tensors["token_embeddings.weight"]
    torch.save(networks.r2r_file(CLASSES[0], tensors), source)
    same(R2R, source, out, model, threshold=-1.0)


@pytest.mark.parametrize(("kind", "router"), [(None, Citer), ("confidence", Confidence)])
def test_citer_is_folded(tmp_path, model, kind, router):  # noqa: F811
    tensors = networks.confidence_tensors(HIDDEN)
    source = tmp_path / "mlp_iter_1234.pth"
    torch.save(tensors, source)
    out = tmp_path / "out"
    said = converted(tmp_path, out, *(["--router", kind] if kind else []))
    assert (kind or "citer") in said and "no threshold" in said
    assert set(load_file(next(out.glob("*.safetensors")))) == {
        f"{layer}.{part}" for layer in ("mlp.0", "mlp.4", "linear") for part in ("weight", "bias")
    }
    same(router, source, out, model)
    # And once more from what was written, with nothing to fold.
    converted(out, tmp_path / "again.safetensors")
    same(router, source, tmp_path / "again.safetensors", model)


@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_a_co_llm_folder(tmp_path, model, form):  # noqa: F811
    source = tmp_path / "fine-tuned"
    source.mkdir()
    vector = networks.defer_vector(HIDDEN)
    deferring_folder(source, vector, tied=False, form=form)
    out = tmp_path / "out"
    assert f"hidden size {HIDDEN}" in converted(source, out)
    same(CoLLM, source, out, model)
    assert torch.equal(load_file(out / "deferral.safetensors")["deferral"], vector[0])
    facts = json.loads((out / "deferral.json").read_text())
    assert facts["defer_token_id"] == SIZE + 1
    # The token is as dangerous to a tokenizer that has it as it was in the folder.
    facts["defer_token_id"] = SIZE - 1
    (out / "deferral.json").write_text(json.dumps(facts))
    with pytest.raises(Exception, match=r"<\|defer\|> is id 49 of the 50 ids"):
        make(CoLLM, out, model)


def test_a_co_llm_vector(tmp_path, model):  # noqa: F811
    source = tmp_path / "gperp_init.bin"
    torch.save(networks.defer_vector(HIDDEN), source)
    converted(source, tmp_path / "out.safetensors")
    same(CoLLM, source, tmp_path / "out.safetensors", model)


@pytest.mark.parametrize(
    ("router", "name", "tensors", "usual"),
    [
        (Citer, "tau", networks.confidence_tensors(HIDDEN), 0.95),
        (Confidence, "threshold", networks.confidence_tensors(HIDDEN), 0.7),
        (CoLLM, "eta", networks.defer_vector(HIDDEN), 0.15),
    ],
)
def test_a_threshold_is_stored_used_and_said_to_be_overridden(
    tmp_path,
    model,  # noqa: F811
    caplog,
    router,
    name,
    tensors,
    usual,
):
    source, out = tmp_path / "x.pth", tmp_path / "out.safetensors"
    torch.save(tensors, source)
    assert make(router, source, model, **{name: -1.0}).context.config[name] == usual
    converted(source, out, "--threshold", 0.25)
    with caplog.at_level(logging.INFO):
        stored = make(router, out, model, **{name: -1.0})
        assert stored.context.config[name] == 0.25
        assert stored.parameters[0].default == 0.25
        assert f"{name} 0.25, as" in caplog.text
        caplog.clear()
        make(router, out, model, **{name: 0.5})
    assert f"{name} 0.5 overrides 0.25 of {out}" in caplog.text


def test_an_overridden_threshold_is_said_when_converting(tmp_path):
    source = tmp_path / "x.pt"
    tensors = networks.r2r_tensors(CLASSES[0], HIDDEN)
    torch.save(networks.r2r_file(CLASSES[0], tensors, threshold=0.4), source)
    run = convert(source, "-o", tmp_path / "out", "--threshold", 0.3)
    assert "threshold 0.3 overrides 0.4" in run.stderr
    assert "threshold 0.3" in run.stdout


class Bomb:
    """Pickled, it would make a folder when it is read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("kind", [None, "r2r", "citer", "co-llm"])
def test_a_file_that_would_run_code_is_refused(tmp_path, kind):
    made, source = tmp_path / "made", tmp_path / "bad.pt"
    torch.save({"state_dict": {}, "extra": Bomb(made)}, source)
    run = convert(source, "-o", tmp_path / "out", *(["--router", kind] if kind else []))
    assert run.exit_code == 2
    assert "refused, because reading it could run code" in run.stderr
    assert not made.exists()
    assert not (tmp_path / "out").exists()


def test_what_is_no_router_is_refused(tmp_path):
    source = tmp_path / "x.pt"
    torch.save({"a": torch.ones(1)}, source)
    run = convert(source, "-o", tmp_path / "out")
    assert run.exit_code == 2
    assert "neither an R2R file" in run.stderr
    run = convert(tmp_path / "nowhere", "-o", tmp_path / "out")
    assert "no such file or folder" in run.stderr
    tensors = networks.r2r_tensors(CLASSES[0], HIDDEN)
    torch.save(networks.r2r_file("MultiClassClassifier", tensors), source)
    run = convert(source, "-o", tmp_path / "out")
    assert "its model_type is 'MultiClassClassifier'" in run.stderr
    del tensors["combined_projection.bias"]
    torch.save(networks.r2r_file(CLASSES[0], tensors), source)
    run = convert(source, "-o", tmp_path / "out")
    assert "lacks the tensor combined_projection.bias" in run.stderr
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten(tmp_path):
    source, out = tmp_path / "x.pth", tmp_path / "out.safetensors"
    torch.save(networks.confidence_tensors(HIDDEN), source)
    out.with_suffix(".json").write_text("precious")
    run = convert(source, "-o", out)
    assert run.exit_code == 2
    assert "is there already; nothing was written" in run.stderr
    assert not out.exists()


def test_a_write_that_fails_is_one_message(tmp_path):
    source, out = tmp_path / "x.pth", tmp_path / "out.safetensors"
    torch.save(networks.confidence_tensors(HIDDEN), source)
    out.with_suffix(".part").mkdir()
    run = convert(source, "-o", out)
    assert run.exit_code == 2
    assert f"convert-router: cannot write {out}: " in run.stderr
