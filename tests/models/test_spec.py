"""Reading a config.json, in both transformers' spellings, and refusing what is not computed."""

import json
import math
import subprocess
import sys

import pytest

from tests.models.reference import CASES, make_model, rewrite_config, save
from trserve.errors import ModelUnavailableError
from trserve.models.aliases import HUB_ALIASES, alias_spec
from trserve.models.rope_scaling import Llama3Scaling, YarnScaling
from trserve.models.spec import read_spec

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}


def write_config(path, **changes):
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 1024,
    }
    (path / "config.json").write_text(json.dumps({**config, **changes}))
    return path


@pytest.mark.parametrize("case", list(CASES))
def test_number_of_parameters_is_exact(case, tmp_path):
    model = make_model(case)
    spec = read_spec(save(model, tmp_path))
    assert spec.num_parameters == model.num_parameters()
    assert spec.architecture == type(model).__name__


@pytest.mark.parametrize(
    ("alias", "billions", "kv_kib"),
    [
        ("0.6b", 0.596, 112),
        ("1.7b", 1.721, 112),
        ("4b", 4.022, 144),
        ("8b", 8.191, 144),
        ("14b", 14.768, 160),
        ("32b", 32.762, 256),
    ],
)
def test_shipped_configurations_have_the_published_sizes(alias, billions, kv_kib):
    """Parameters as the model cards state them; KV per token follows from layers and KV heads."""
    spec = alias_spec(alias)
    assert spec.num_parameters / 1e9 == pytest.approx(billions, abs=5e-4)
    assert spec.kv_bytes_per_token(2) == kv_kib * 1024
    assert (spec.vocab_size, spec.eos_token_ids, spec.dtype) == (151936, (151645,), "bfloat16")


def test_every_hub_alias_ships_a_configuration():
    assert all(alias_spec(alias).qk_norm for alias in HUB_ALIASES)
    assert alias_spec("zero-layer").num_layers == 0


def test_defaults_of_an_old_llama_config(tmp_path):
    spec = read_spec(write_config(tmp_path))
    assert (spec.num_kv_heads, spec.head_dim, spec.rope_theta) == (4, 16, 10_000.0)
    assert not (spec.tie_word_embeddings or spec.attention_bias or spec.qk_norm)
    assert spec.eos_token_ids == ()


def test_qwen3_without_head_dim_means_128(tmp_path):
    assert read_spec(write_config(tmp_path, architectures=["Qwen3ForCausalLM"])).head_dim == 128


def test_qwen2_has_biases_on_queries_keys_and_values_only(tmp_path):
    spec = read_spec(write_config(tmp_path, architectures=["Qwen2ForCausalLM"]))
    assert spec.attention_bias
    assert not spec.output_bias


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_scaling": {**LLAMA3, "type": "llama3"}},
    ],
)
def test_both_spellings_of_rope(tmp_path, changes):
    spec = read_spec(write_config(tmp_path, **changes))
    assert spec.rope_theta == 5e5
    assert spec.rope_scaling == Llama3Scaling(8.0, 1.0, 4.0, 8192)


def test_a_scaling_that_somebody_added_wins_over_what_was_saved(tmp_path):
    saved = {"rope_theta": 5e5, "rope_type": "default"}
    spec = read_spec(write_config(tmp_path, rope_parameters=saved, rope_scaling=YARN))
    assert spec.rope_scaling == read_spec(write_config(tmp_path, rope_scaling=YARN)).rope_scaling
    assert spec.rope_theta == 5e5


YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


def test_yarn_lengthens_the_context(tmp_path):
    """Published configurations turn it on without touching the length that they state."""
    spec = read_spec(write_config(tmp_path, rope_scaling=YARN))
    assert spec.rope_scaling == YarnScaling(4.0, 1024, 0.1 * math.log(4) + 1)
    assert spec.max_position_embeddings == 4096
    stated = read_spec(write_config(tmp_path, rope_scaling=YARN, max_position_embeddings=8192))
    assert stated.max_position_embeddings == 8192


def test_experts_in_the_layers_that_the_config_names(tmp_path):
    changes = {**EXPERTS, "num_hidden_layers": 6}
    every = read_spec(write_config(tmp_path, **changes))
    assert every.experts.layers == tuple(range(6))
    some = read_spec(
        write_config(tmp_path, **changes, decoder_sparse_step=2, mlp_only_layers=[3, 4])
    )
    assert [some.has_experts(layer) for layer in range(6)] == [0, 1, 0, 0, 0, 1]
    assert some.head_dim == 16


def test_weight_bytes_are_those_of_the_parameters_and_a_second_head(tmp_path):
    spec = read_spec(write_config(tmp_path))
    assert spec.weight_bytes(2) == 2 * (spec.num_parameters + 100 * 64)


def test_a_configuration_alone_has_a_spec(tmp_path):
    expected = read_spec(write_config(tmp_path))
    assert read_spec(tmp_path / "config.json") == expected


def test_eos_is_the_union_of_both_files(tmp_path):
    write_config(tmp_path, eos_token_id=5)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5]}))
    assert read_spec(tmp_path).eos_token_ids == (5, 7)


@pytest.mark.parametrize("value", ["two", {"id": 2}, [2, None]])
def test_the_file_with_a_malformed_end_is_the_one_named(tmp_path, value):
    write_config(tmp_path, eos_token_id=5)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(
        ModelUnavailableError, match=r"generation_config\.json: eos_token_id should"
    ):
        read_spec(tmp_path)


def test_architecture_from_model_type(tmp_path):
    spec = read_spec(write_config(tmp_path, architectures=None, model_type="qwen3"))
    assert spec.architecture == "Qwen3ForCausalLM"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*Qwen3ForCausalLM, Qwen3Moe"),
        ({"architectures": None, "model_type": "mamba"}, "mamba.*supported are"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'"),
        ({"rope_parameters": {"rope_theta": 5e5}, "rope_scaling": {"type": "ntk"}}, "'ntk'"),
        ({"rope_scaling": {"type": "longrope"}}, "'longrope'.*default, linear, llama3, yarn"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"partial_rotary_factor": 0.5}, "only a part of each head"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "lacks 'low_freq_factor'"),
        ({"hidden_act": "gelu"}, "hidden_act to 'gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "use_sliding_window"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"num_key_value_heads": 3}, "4 heads over 3 KV heads"),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "lacks 'num_local_experts'"),
        ({**EXPERTS, "num_experts_per_tok": 5}, "cannot take 5 of 4 experts"),
        ({"vocab_size": "many"}, "wrong type"),
        ({"vocab_size": math.inf}, "wrong type"),
        ({"num_attention_heads": 0}, r"config\.json has a value"),
        ({"layer_types": 7}, r"config\.json: layer_types should be a list, and is 7"),
        ({"architectures": {"a": 1}}, r"config\.json: architectures should be a list"),
        ({"eos_token_id": [[2]]}, r"/config\.json: eos_token_id should be an id or a list of ids"),
    ],
)
def test_unsupported_configurations_say_what_and_why(tmp_path, changes, message):
    with pytest.raises(ModelUnavailableError, match=message):
        read_spec(write_config(tmp_path, **changes))


def test_missing_and_broken_files(tmp_path):
    with pytest.raises(ModelUnavailableError, match=r"config\.json is missing"):
        read_spec(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelUnavailableError, match="cannot be read as JSON"):
        read_spec(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelUnavailableError, match="does not hold a JSON object"):
        read_spec(tmp_path)


def test_a_missing_key_is_named(tmp_path):
    write_config(tmp_path)
    rewrite_config(tmp_path, hidden_size=None)
    with pytest.raises(ModelUnavailableError, match="lacks 'hidden_size'"):
        read_spec(tmp_path)


def test_spec_and_aliases_import_no_torch():
    code = (
        "import sys, trserve.models.gguf_tokenizer, trserve.models.aliases as a;"
        "a.alias_spec('8b');"
        "sys.exit(bool({'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
