"""The shape of a model as a GGUF file states it, and whether its weights can be read here.

Imported by the launcher and the gateway, so it knows nothing of torch; ``gguf`` reads weights.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trserve.errors import ModelUnavailableError
from trserve.models.gguf_file import BLOCKED, QUANTIZATIONS, GgufFile
from trserve.models.rope_scaling import (
    FrequencyDivisors,
    LinearScaling,
    RopeScaling,
    YarnScaling,
    longest_position,
    yarn_temperature,
)
from trserve.models.spec import ModelSpec, check_layout

ARCHITECTURES: Mapping[str, str] = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "llama": "LlamaForCausalLM",
}

_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def read_gguf_spec(path: Path) -> ModelSpec:
    """The spec of the GGUF file ``path``.

    Raises:
        ModelUnavailableError: the file is damaged, or asks for something that this package does
            not compute or cannot read.
    """
    return gguf_spec(GgufFile(path))


def gguf_spec(file: GgufFile) -> ModelSpec:
    """As :func:`read_gguf_spec`, of an open file."""
    name = str(file.metadata.get("general.architecture"))
    if name not in ARCHITECTURES:
        raise ModelUnavailableError(
            f"{file.path} holds the architecture {name!r}, which is not supported in GGUF files; "
            f"supported are {', '.join(ARCHITECTURES)}"
        )
    _refuse_unreadable(file)
    keys = {
        key.removeprefix(f"{name}."): value
        for key, value in file.metadata.items()
        if key.startswith(f"{name}.")
    }
    try:
        spec = _build(ARCHITECTURES[name], keys, file)
    except KeyError as missing:
        raise ModelUnavailableError(
            f"{file.path} lacks {missing}, which the architecture {name!r} needs"
        ) from None
    except (TypeError, ValueError) as error:
        raise ModelUnavailableError(f"{file.path} has an unusable value: {error}") from None
    check_layout(spec, str(file.path))
    return spec


def end_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Ids that end a turn, as the file names them: of text, of turn, of message."""
    ids = [metadata.get(f"tokenizer.ggml.{key}") for key in _END_KEYS]
    return tuple(dict.fromkeys(int(i) for i in ids if i is not None))


def _refuse_unreadable(file: GgufFile) -> None:
    """Before anything loads: types of weights that are not read, or only with a package."""
    for name, entry in file.tensors.items():
        if entry.type not in QUANTIZATIONS:
            raise ModelUnavailableError(
                f"{file.path} stores {name} as {entry.type_name}, which is not supported; "
                f"supported are {', '.join(kind.name for kind in QUANTIZATIONS.values())}"
            )
    blocked = any(entry.type in BLOCKED for entry in file.tensors.values())
    if blocked and importlib.util.find_spec("gguf") is None:
        raise ModelUnavailableError(
            f"{file.path} is quantized, and reading it needs the package gguf: "
            "pip install trserve[gguf]"
        )


def _build(architecture: str, keys: Mapping[str, Any], file: GgufFile) -> ModelSpec:
    heads, hidden = int(keys["attention.head_count"]), int(keys["embedding_length"])
    _refuse_variants(keys)
    head_dim = int(keys.get("attention.key_length") or hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if int(keys.get(key) or head_dim) != head_dim:
            raise ValueError(f"{key} {keys[key]} is not the size of a head, {head_dim}")
    scaling = _scaling(keys, file)
    return ModelSpec(
        architecture=architecture,
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden_size=hidden,
        intermediate_size=int(keys["feed_forward_length"]),
        num_layers=int(keys["block_count"]),
        num_heads=heads,
        num_kv_heads=int(keys.get("attention.head_count_kv") or heads),
        head_dim=head_dim,
        rms_norm_eps=float(keys["attention.layer_norm_rms_epsilon"]),
        rope_theta=float(keys.get("rope.freq_base") or 10_000.0),
        rope_scaling=scaling,
        max_position_embeddings=longest_position(scaling, int(keys["context_length"])),
        tie_word_embeddings="output.weight" not in file.tensors,
        attention_bias=architecture == "Qwen2ForCausalLM" or "blk.0.attn_q.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        qk_norm=architecture == "Qwen3ForCausalLM",
        eos_token_ids=end_ids(file.metadata),
    )


def _refuse_variants(keys: Mapping[str, Any]) -> None:
    """Models that share an architecture's name but not its arithmetic."""
    for key in ("expert_count", "attention.sliding_window"):
        if keys.get(key):
            raise ValueError(f"{key} {keys[key]} is not supported for this architecture")


def _scaling(keys: Mapping[str, Any], file: GgufFile) -> RopeScaling | None:
    """Divisors that were worked out for the file win: the rule they follow is not in it."""
    if "rope_freqs.weight" in file.tensors:
        divisors = file.raw("rope_freqs.weight").view(np.float32)
        return FrequencyDivisors(tuple(divisors.tolist()))
    kind = keys.get("rope.scaling.type") or "none"
    if kind == "none":
        return None
    factor = float(keys["rope.scaling.factor"])
    if kind == "linear":
        return LinearScaling(factor)
    if kind != "yarn":
        raise ValueError(f"rope.scaling.type {kind!r}; supported are none, linear and yarn")
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=int(keys["rope.scaling.original_context_length"]),
        # The file's factor comes on top of the paper's.
        attention_factor=float(keys.get("rope.scaling.attn_factor") or 1.0)
        * yarn_temperature(factor),
        beta_fast=float(keys.get("rope.scaling.yarn_beta_fast") or 32),
        beta_slow=float(keys.get("rope.scaling.yarn_beta_slow") or 1),
    )
