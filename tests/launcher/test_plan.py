"""From a configuration to a plan: joint KV capacity, routers, threads, and what is refused."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.gateway.small_tokenizers import byte_level, save, word_piece
from trserve import kv_blocks as kv_blocks_module
from trserve import model_plans as plan_module
from trserve import plan as server_plan_module
from trserve.config import config_from_flags
from trserve.edge.facts import RemoteFacts
from trserve.errors import ConfigError, ModelUnavailableError
from trserve.models.spec import read_spec
from trserve.plan import ServerPlan, make_plan
from trserve.workers import grammar as grammar_module
from trserve.workers.grammar import create_grammars

CONFIG = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
PER_TOKEN = 2 * 2 * 2 * 8 * 4  # keys and values, layers, KV heads, head size, float32


def checkpoint(path: Path, tokenizer: Any = None, **config: Any) -> str:
    save(tokenizer or byte_level(), path)
    (path / "config.json").write_text(json.dumps({**CONFIG, **config}))
    (path / "model.safetensors").touch()
    return str(path)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("pair")
    large = {"num_hidden_layers": 6, "max_position_embeddings": 256, "eos_token_id": [2, 3]}
    return checkpoint(folder / "small"), checkpoint(folder / "large", **large)


def plan(models: tuple[str, ...], **values: Any) -> ServerPlan:
    return make_plan(config_from_flags({"models": models, **values}))


def test_a_plan_survives_the_control_plane(pair: tuple[str, str]) -> None:
    made = plan(pair)
    sent = json.loads(json.dumps(msgspec.to_builtins(made)))
    assert msgspec.convert(sent, ServerPlan) == made


def test_models_keep_their_order_and_lengths(pair: tuple[str, str]) -> None:
    made = plan(pair)
    assert [model.name for model in made.models] == ["small", "large"]
    assert [model.max_model_len for model in made.models] == [128, 256]
    assert made.row_tokens == made.layout.row_tokens == 256
    assert made.layout.workers == 2
    assert [m.max_model_len for m in plan(pair, max_model_len=100).models] == [100, 100]


def test_prefixes_are_cached_unless_that_is_turned_off(pair: tuple[str, str]) -> None:
    assert plan(pair).prefix_caching
    assert not plan(pair, enable_prefix_caching=False).prefix_caching


def test_the_ends_are_the_union_over_the_models(pair: tuple[str, str]) -> None:
    assert {2, 3} <= set(plan(pair).eos_token_ids)


@given(memory=st.integers(1, 2**22), size=st.integers(1, 64), requests=st.integers(1, 300))
def test_all_models_hold_the_same_tokens_within_the_budget(
    pair: tuple[str, str], memory: int, size: int, requests: int
) -> None:
    per_token = PER_TOKEN * (1 + 3)  # the large one has three times the layers
    values = {"memory": memory, "block_size": size, "max_requests": requests}
    if memory // per_token < size:
        with pytest.raises(ConfigError, match="--memory"):
            plan(pair, **values)
        return
    made = plan(pair, **values)
    blocks = [model.num_blocks for model in made.models]
    used = sum(n * size * cost for n, cost in zip(blocks, (PER_TOKEN, 3 * PER_TOKEN), strict=True))
    assert used <= memory
    capacity = memory // per_token // size
    most = [-(-length // size) * requests for length in (128, 256)]
    assert blocks == [min(capacity, limit) for limit in most]
    assert min(blocks) >= 1


def test_tokens_of_kv_may_be_given_for_each_model(pair: tuple[str, str]) -> None:
    made = plan(pair, kv_tokens=(100, 40), block_size=16)
    assert [model.num_blocks for model in made.models] == [6, 2]


@pytest.mark.parametrize(
    ("tokens", "message"),
    [((64,), "2 models need a number each"), ((64, 8), "a block has 16 tokens"),
     ((2**50, 64), "more than the memory that is free")],
)  # fmt: skip
def test_tokens_of_kv_that_cannot_be_are_refused(
    pair: tuple[str, str], tokens: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"--kv-tokens [\d,]+: .*{message}"):
        plan(pair, kv_tokens=tokens, block_size=16)


def test_the_weights_are_taken_off_before_the_cache(
    pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With little memory beside the weights the cache gets what they leave, not a quarter."""
    weights = sum(read_spec(Path(path)).weight_bytes(4) for path in pair)
    free = (weights + 100_000) * 8 // 7
    for module in plan_module, kv_blocks_module:
        monkeypatch.setattr(module, "available_memory", lambda: free)
    made = plan(pair, dtype="float32", block_size=16)
    used = sum(
        model.num_blocks * 16 * cost
        for model, cost in zip(made.models, (PER_TOKEN, 3 * PER_TOKEN), strict=True)
    )
    assert 0 < used <= free - weights - free // 8 + 1


def test_two_models_are_stitched_and_any_other_number_is_not(pair: tuple[str, str]) -> None:
    made = plan(pair)
    config = {"tau": 0.03, "hysteresis": 0.0, "target_share": 0.0}
    assert (made.router, made.router_config) == ("r-stitch", config)
    assert plan(pair[:1]).router == "none"
    assert plan((*pair, pair[0])).router == "none"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"router": "r-stitch", "models": 1}, r"--router r-stitch needs 2 models"),
        ({"router": "r-stitch", "models": 3}, r"--router r-stitch needs 2 models"),
        ({"router": "nonsense"}, r"--router nonsense.*known"),
        ({"router_config": (("eta", "0.5"),)}, r"--router-config.*'eta'.*tau"),
        ({"router_config": (("tau", "2"),)}, r"--router-config.*tau"),
        ({"gpus": ((0,), (0,)), "device": "cpu"}, r"--gpus 0/0: is for --device cuda, not cpu"),
        ({"mps": "on", "device": "cpu"}, r"--mps on: is for --device cuda"),
        ({"router_config": (("tau", "x"),)}, r"--router-config tau=x"),
        ({"router_config": (("tau", "nan"),)}, r"--router-config.*tau"),
        ({"max_model_len": 129}, r"--max-model-len 129.*small.*128"),
    ],
)
def test_a_wrong_flag_is_named(pair: tuple[str, str], values: Any, message: str) -> None:
    names = {1: pair[:1], 2: pair, 3: (*pair, pair[0])}[values.pop("models", 2)]
    with pytest.raises(ConfigError, match=message):
        plan(names, **values)


def test_a_routers_own_parameters_are_checked_where_it_is_loaded(pair: tuple[str, str]) -> None:
    made = plan(pair, router="my.module:Router", router_config=(("weight", "3"),))
    assert (made.router, made.router_config) == ("my.module:Router", {"weight": 3.0})


def test_what_is_not_here_is_said(pair: tuple[str, str], tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailableError, match="--device cuda"):
        plan(pair, device="cuda")
    with pytest.raises(ModelUnavailableError, match="nowhere"):
        plan((pair[0], str(tmp_path / "nowhere")))


def test_models_must_share_a_tokenizer(pair: tuple[str, str], tmp_path: Path) -> None:
    other = checkpoint(tmp_path / "other", word_piece())
    with pytest.raises(ConfigError, match="different tokenizers"):
        plan((pair[0], other))


def test_a_renumbering_of_special_tokens_is_mapped(pair: tuple[str, str], tmp_path: Path) -> None:
    """Ends are then ends under the first model's ids."""
    assert not any(model.token_map for model in plan(pair).models)
    stated = json.loads(byte_level().to_str())
    first, second = stated["added_tokens"][:2]
    vocabulary, ids = stated["model"]["vocab"], (first["id"], second["id"])
    first["content"], second["content"] = second["content"], first["content"]
    vocabulary |= {each["content"]: each["id"] for each in (first, second)}
    swapped = Tokenizer.from_str(json.dumps(stated))
    other = checkpoint(tmp_path / "other", swapped, eos_token_id=[ids[0], 77])
    mapped = plan((pair[0], other))
    assert not mapped.models[0].token_map
    assert dict(mapped.models[1].token_map.moved) == {ids[0]: ids[1], ids[1]: ids[0]}
    assert set(mapped.eos_token_ids) - set(plan(pair[:1]).eos_token_ids) == {ids[1], 77}
    sent = json.loads(json.dumps(msgspec.to_builtins(mapped)))
    assert msgspec.convert(sent, ServerPlan) == mapped


def test_a_token_without_a_row_is_refused(pair: tuple[str, str], tmp_path: Path) -> None:
    """Its checkpoint would break off as it is loaded."""
    stated = json.loads(byte_level().to_str())
    last = stated["added_tokens"][-1]
    size = last["id"] + 1
    renamed = {**last, "content": "<|theirs|>"}
    stated["added_tokens"] += [{**last, "id": size}]
    stated["added_tokens"][-2] = renamed
    other = checkpoint(tmp_path / "short", Tokenizer.from_str(json.dumps(stated)), vocab_size=size)
    with pytest.raises(ConfigError, match=rf"short has {size} vocabulary rows.*at id {size}: give"):
        plan((pair[0], other))


def test_an_end_beyond_the_tokenizer_is_none(
    pair: tuple[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not every model has a row for it, and ``min_tokens`` bans the rows of ends."""
    size = plan(pair).tokenizer_size
    wide = checkpoint(tmp_path / "wide", vocab_size=size + 40, eos_token_id=[2, size, size + 39])
    made = plan((checkpoint(tmp_path / "even", vocab_size=size), wide))
    assert made.eos_token_ids == plan(pair[:1]).eos_token_ids
    assert f"wide: eos_token_id in its config.json or generation_config.json is {size}" in (
        caplog.text
    )


def test_a_large_vocabulary_without_ends_keeps_no_worker_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No grammar can be followed on it; the gateway says so to who sends one."""
    monkeypatch.setattr(grammar_module, "_LARGE", 0)
    folder = checkpoint(tmp_path / "endless", eos_token_id=500)
    made = plan((folder,))
    assert made.eos_token_ids == []
    create_grammars(made)


def test_a_model_must_know_all_ids(pair: tuple[str, str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"narrow has 100 vocabulary rows"):
        plan((pair[0], checkpoint(tmp_path / "narrow", vocab_size=100)))


def test_cores_are_shared_out(pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, each in ((1, 1), (2, 1), (5, 2), (64, 32)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        assert [model.threads for model in plan(pair).models] == [each, each]
    assert [model.threads for model in plan(pair, threads=(3, 1)).models] == [3, 1]


def test_every_model_has_a_name_of_its_own(pair: tuple[str, str], tmp_path: Path) -> None:
    """Names are keys of the usage, and what ``only`` names."""
    second = checkpoint(tmp_path / "small-2")
    names = [model.name for model in plan((pair[0], second, pair[0], pair[0])).models]
    assert names[:2] == ["small", "small-2"]
    assert len(set(names)) == 4


def test_a_model_elsewhere_has_rows_no_longer_than_the_slabs(
    pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = [None, RemoteFacts(max_model_len=10**6)]
    monkeypatch.setattr(server_plan_module, "ask_hosts", lambda *_: facts)
    found = plan((pair[0], "large@10.0.0.2:9000"), router="none")
    assert found.models[1].max_model_len == found.row_tokens == found.models[0].max_model_len


def test_a_port_for_others_needs_keys_before_anything_is_started(pair: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match="--edge-keys FILE: a link between hosts needs keys"):
        plan((f"{pair[0]}@edge", pair[1]), edge_listen="127.0.0.1:0")


def test_who_begins_every_answer_is_not_at_a_server_that_takes_ids(pair: tuple[str, str]) -> None:
    """What is written there comes home to the first model, which would be itself."""
    far = "large@openai:http://127.0.0.1:9"
    with pytest.raises(ConfigError, match=re.escape(f"as in --models {pair[0]},{far}")):
        plan((far, pair[0]), router="none", on_peer_loss="degrade")
    named = plan((pair[0], far), router="none", on_peer_loss="degrade")
    assert [bool(model.remote) for model in named.models] == [False, True]
