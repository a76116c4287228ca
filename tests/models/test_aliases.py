"""What a model's name resolves to, and what is said when it resolves to nothing."""

import json
import shutil
from dataclasses import replace

import pytest

from tests.models.gguf_writing import write_gguf
from tests.models.reference import make_model, save
from trserve import demo
from trserve.errors import ModelUnavailableError
from trserve.gateway.tokenizer import Tokenizer
from trserve.models.aliases import HUB_ALIASES, alias_spec, hub_cache, resolve_model
from trserve.models.spec import read_spec


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save(make_model("qwen3"), tmp_path_factory.mktemp("models") / "my-model")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("HUGGINGFACE_HUB_CACHE", raising=False)
    return tmp_path / "hub"


def put_in_cache(cache, checkpoint, hub_id="Qwen/Qwen3-0.6B", revision="abc123"):
    repository = cache / f"models--{hub_id.replace('/', '--')}"
    snapshot = repository / "snapshots" / revision
    shutil.copytree(checkpoint, snapshot)
    return repository, snapshot


def refusal(name, load_format="auto"):
    with pytest.raises(ModelUnavailableError) as info:
        resolve_model(name, load_format)
    lines = str(info.value).splitlines()
    assert len(lines) == 2
    assert "--models tiny,small" in lines[1]
    assert info.value.exit_code == 3
    return lines[0]


def test_a_path_is_itself(checkpoint):
    model = resolve_model(str(checkpoint))
    assert (model.name, model.path) == ("my-model", checkpoint)
    assert model.spec.num_layers == 2
    assert resolve_model(f"{checkpoint}/").name == "my-model"


def test_an_alias_resolves_through_the_hub_cache(cache, checkpoint):
    repository, snapshot = put_in_cache(cache, checkpoint)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc123\n")
    put_in_cache(cache, checkpoint, revision="newer")
    for name, shown in (("0.6b", "0.6b"), ("0.6B", "0.6b"), ("Qwen/Qwen3-0.6B", "Qwen3-0.6B")):
        model = resolve_model(name)
        assert (model.name, model.path) == (shown, snapshot)


def test_without_a_ref_any_snapshot_will_do(cache, checkpoint):
    _, snapshot = put_in_cache(cache, checkpoint, "org/other")
    assert resolve_model("org/other").path == snapshot


def test_missing_alias_names_alias_hub_id_and_cache(cache):
    line = refusal("32b")
    assert "'32b'" in line
    assert "Qwen/Qwen3-32B" in line
    assert f"not in the local cache ({cache})" in line


def test_missing_hub_id(cache):
    assert "'org/model' is not in the local cache" in refusal("org/model")


def test_unknown_names_list_the_aliases():
    line = refusal("70b")
    assert all(alias in line for alias in (*HUB_ALIASES, "tiny", "small", "zero-layer"))


def test_zero_layer_has_only_a_configuration():
    assert "no weights" in refusal("zero-layer")
    assert alias_spec("zero-layer").num_layers == 0


def test_zero_layer_without_weights_names_the_flag():
    with pytest.raises(ModelUnavailableError, match="--load-format dummy"):
        resolve_model("zero-layer")


@pytest.mark.parametrize("name", [*HUB_ALIASES, "zero-layer", "32B"])
def test_dummy_weights_need_a_configuration_only(name):
    model = resolve_model(name, "dummy")
    assert model.name == name.lower()
    assert read_spec(model.path) == alias_spec(name.lower())
    # The text is the embedded pair's, so that the model's own ends mean nothing.
    assert (model.own_tokenizer, model.tokenizer_path) == (False, demo.model_path("tiny"))
    assert model.spec == replace(alias_spec(name.lower()), eos_token_ids=())


def test_the_smallest_shape_has_room_for_the_embedded_tokenizer():
    tokenizer = Tokenizer.load(resolve_model("zero-layer", "dummy").tokenizer_path)
    assert tokenizer.size <= alias_spec("zero-layer").vocab_size <= 1024


def test_dummy_weights_take_the_own_tokenizer_if_it_is_there(cache, checkpoint):
    _, snapshot = put_in_cache(cache, checkpoint)
    (snapshot / "model.safetensors").unlink()
    assert not resolve_model("0.6b", "dummy").own_tokenizer
    (snapshot / "tokenizer.json").write_text("{}")
    for name in ("0.6b", str(snapshot)):
        model = resolve_model(name, "dummy")
        assert (model.path, model.tokenizer_path) == (snapshot, snapshot)
        assert model.own_tokenizer
        assert model.spec.eos_token_ids == (2,)
    assert "no *.safetensors" in refusal("0.6b")


def test_dummy_weights_of_an_unknown_name_are_refused():
    assert "not in the local cache" in refusal("org/model", "dummy")
    assert "neither an alias" in refusal("70b", "dummy")


@pytest.fixture
def gguf(tmp_path):
    """A directory with one GGUF file."""
    directory = tmp_path / "gguf"
    directory.mkdir()
    return write_gguf(make_model("qwen3"), directory / "weights.gguf")


def test_a_gguf_file_or_the_directory_of_one(gguf):
    for name in (gguf, gguf.parent):
        for load_format in ("auto", "gguf", "dummy"):
            model = resolve_model(str(name), load_format)
            assert (model.path, model.tokenizer_path, model.own_tokenizer) == (gguf, gguf, True)
            assert model.spec.architecture == "Qwen3ForCausalLM"
    assert resolve_model(str(gguf)).name == "weights"


def test_a_tokenizer_beside_a_gguf_file_wins(gguf):
    (gguf.parent / "tokenizer.json").write_text("{}")
    assert resolve_model(str(gguf)).tokenizer_path == gguf.parent


def test_which_weights_are_meant(gguf, checkpoint):
    assert "is a GGUF file" in refusal(str(gguf), "safetensors")
    assert "config.json is missing" in refusal(str(gguf.parent), "safetensors")
    assert "holds none" in refusal(str(checkpoint), "gguf")
    shutil.copytree(checkpoint, gguf.parent, dirs_exist_ok=True)
    assert resolve_model(str(gguf.parent)).path == gguf.parent
    assert resolve_model(str(gguf.parent), "gguf").path == gguf
    shutil.copy(gguf, gguf.parent / "other.gguf")
    assert "other.gguf, weights.gguf" in refusal(str(gguf.parent), "gguf")


def test_directories_that_are_no_checkpoints(checkpoint, tmp_path):
    assert "config.json is missing" in refusal(str(tmp_path))
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(checkpoint / "config.json", bare)
    assert "no *.safetensors" in refusal(str(bare))
    assert "should be a checkpoint directory" in refusal(str(bare / "config.json"))


def test_incomplete_shards_are_named(tmp_path):
    path = save(make_model("qwen3"), tmp_path / "sharded", max_shard_size="40KB")
    shards = sorted(path.glob("*.safetensors"))
    assert len(shards) > 2
    assert resolve_model(str(path)).path == path
    shards[1].unlink()
    assert shards[1].name in refusal(str(path))


@pytest.mark.parametrize("mapped", [["a.safetensors"], {"w": 3}, {"w": None}, "a.safetensors"])
def test_an_index_that_is_malformed_is_named(mapped, checkpoint, tmp_path):
    path = shutil.copytree(checkpoint, tmp_path / "malformed")
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": mapped}))
    assert f"{index}: weight_map should name a file for each tensor" in refusal(str(path))


@pytest.mark.parametrize("name", ["tiny", "small"])
def test_embedded_pair_wins_over_a_directory_of_that_name(name, checkpoint, tmp_path, monkeypatch):
    home = tmp_path / "pair"
    shutil.copytree(checkpoint, home / name)
    monkeypatch.setattr(demo, "model_path", lambda model: home / model)
    elsewhere = tmp_path / "cwd"
    (elsewhere / name).mkdir(parents=True)
    monkeypatch.chdir(elsewhere)
    assert resolve_model(name).path == home / name
    assert "config.json is missing" in refusal(f"./{name}")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"HF_HUB_CACHE": "/a"}, "/a"),
        ({"HF_HOME": "/b"}, "/b/hub"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/huggingface/hub"),
        ({"HOME": "/d"}, "/d/.cache/huggingface/hub"),
    ],
)
def test_cache_location(variables, expected, monkeypatch):
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert str(hub_cache()) == expected
