"""What a model's name resolves to, and what is said when it resolves to nothing."""

import shutil

import pytest

from tests.models.reference import make_model, save
from trserve import demo
from trserve.errors import ModelUnavailableError
from trserve.models.aliases import HUB_ALIASES, alias_spec, hub_cache, resolve_model


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


def refusal(name):
    with pytest.raises(ModelUnavailableError) as info:
        resolve_model(name)
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
