"""Exports that a server makes on the way, once; and what a plan makes of the device."""

import sys
import threading
from dataclasses import replace

import pytest

from tests.edge.onnx.exporting import random_model, require_runtime
from trserve.config import config_from_flags
from trserve.demo import model_path
from trserve.edge.onnx import placement, stored
from trserve.edge.onnx.files import is_onnx_model
from trserve.edge.onnx.session import load_runtime
from trserve.errors import ConfigError, ModelUnavailableError
from trserve.models.aliases import resolve_model
from trserve.plan import make_plan

require_runtime()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_model_is_exported_once_and_found_again(cache, tmp_path, monkeypatch):
    """Several workers may want it at the same moment; what is there is not written again."""
    model = random_model("qwen3", tmp_path)
    made = []
    export = stored._export
    monkeypatch.setattr(stored, "_export", lambda *args: (made.append(args), export(*args)))
    found = []
    asking = [
        threading.Thread(target=lambda: found.append(stored.exported(model, int8=False)))
        for _ in range(3)
    ]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join(60)
    assert len(found) == 3 and len(set(found)) == 1 and len(made) == 1
    (directory,) = set(found)
    assert is_onnx_model(directory) and directory.is_relative_to(cache)
    assert [each.name for each in directory.parent.iterdir() if each.is_dir()] == [directory.name]
    other = stored.stored_path(model, int8=True)
    assert other != directory
    assert stored.stored_path(resolve_model("tiny"), int8=False) not in (directory, other)


def test_weights_that_are_drawn_are_another_model_s_where_the_shape_is(cache, tmp_path):
    model = random_model("qwen3", tmp_path)
    smaller = replace(model, spec=replace(model.spec, num_layers=1))
    paths = {stored.stored_path(m, int8=False, load_format="dummy") for m in (model, smaller)}
    assert len(paths) == 2
    other_ends = replace(model, spec=replace(model.spec, eos_token_ids=(1,)))
    assert stored.stored_path(other_ends, int8=False, load_format="dummy") in paths
    assert stored.stored_path(model, int8=False) not in paths


def test_a_rest_of_an_export_is_replaced(cache, tmp_path):
    model = random_model("qwen3", tmp_path)
    directory = stored.stored_path(model, int8=False)
    directory.mkdir(parents=True)
    (directory / "weights.data").write_bytes(b"half")
    killed = directory.with_name(f".export-{directory.name}")  # its process had no time to clear up
    killed.mkdir()
    (killed / "weights.data").write_bytes(b"half")
    assert stored.exported(model, int8=False) == directory
    assert is_onnx_model(directory)
    assert not list(directory.parent.glob(".export-*"))


def test_no_room_is_said(cache, tmp_path):
    cache.write_text("a file where a directory should be")
    with pytest.raises(ModelUnavailableError, match="XDG_CACHE_HOME"):
        stored.exported(random_model("qwen3", tmp_path), int8=False)


def test_somebody_who_exports_for_ever_is_not_waited_for(cache, tmp_path, monkeypatch):
    model = random_model("qwen3", tmp_path)
    monkeypatch.setattr(stored, "LOCK_TIMEOUT_S", 0.1)
    directory = stored.stored_path(model, int8=False)
    directory.parent.mkdir(parents=True)
    with stored._locked(directory), pytest.raises(ModelUnavailableError, match="another process"):
        stored.exported(model, int8=False)


def plan_of(**flags):
    return make_plan(config_from_flags({"device": "onnx", **flags}))


def test_a_plan_has_rows_for_blocks_and_float32(cache):
    plan = plan_of(max_requests=8)
    assert (plan.device, plan.block_size, plan.prefix_caching) == ("onnx", 1024, False)
    assert [(each.dtype, each.num_blocks) for each in plan.models] == [("float32", 8)] * 2
    assert plan.row_tokens == 1024
    assert plan_of(max_model_len=256).block_size == 256
    with pytest.raises(ConfigError, match="--dtype bfloat16"):
        plan_of(dtype="bfloat16")


def test_an_export_runs_on_this_device_alone(cache):
    directory = stored.exported(resolve_model("tiny"), int8=False)
    (directory / "tokenizer.json").write_bytes((model_path("tiny") / "tokenizer.json").read_bytes())
    models = (str(directory), "small")
    assert plan_of(models=models).models[0].path == str(directory)
    with pytest.raises(ModelUnavailableError, match="--device onnx"):
        make_plan(config_from_flags({"device": "cpu", "models": models}))
    with pytest.raises(ConfigError, match="--quantization int8"):
        stored.exported(resolve_model(str(directory)), int8=True)


def test_missing_packages_are_named_with_what_to_install(monkeypatch):
    monkeypatch.setattr(placement.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelUnavailableError, match=r"onnxruntime and onnx\npip install") as caught:
        plan_of()
    assert caught.value.exit_code == 3
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ModelUnavailableError, match=r"pip install 'trserve\[edge\]'"):
        load_runtime()
