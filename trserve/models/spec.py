"""The shape of a decoder-only model, as its ``config.json`` states it.

Imported by the launcher and the gateway, so it knows nothing of torch, weights or devices.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trserve.errors import ModelUnavailableError

SUPPORTED_ARCHITECTURES = ("Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM")

_ARCHITECTURE_OF_TYPE = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "llama": "LlamaForCausalLM",
}

_QWEN3_HEAD_DIM = 128
"""Qwen3 configurations that leave ``head_dim`` out mean 128, whatever the hidden size."""


@dataclass(frozen=True)
class RopeScaling:
    """Frequency scaling of Llama 3.1 and later (``rope_type`` ``llama3``).

    Wavelengths above ``original_max_position_embeddings / low_freq_factor`` are stretched by
    ``factor``, those below ``original_max_position_embeddings / high_freq_factor`` are kept, and
    the ones between are interpolated.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class ModelSpec:
    """What must be known of a model before any of its weights are read.

    ``attention_bias`` is about the query, key and value projections; the output projection has a
    bias too except in Qwen2 (:attr:`output_bias`). ``dtype`` is the checkpoint's own, or None.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...]
    dtype: str | None = None

    @property
    def output_bias(self) -> bool:
        """Whether the attention's output projection has a bias."""
        return self.attention_bias and self.architecture != "Qwen2ForCausalLM"

    @property
    def q_size(self) -> int:
        """Width of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the key projection, and of the value projection."""
        return self.num_kv_heads * self.head_dim

    @property
    def num_parameters(self) -> int:
        """Number of weights; tied embeddings count once."""
        hidden, inter = self.hidden_size, self.intermediate_size
        attention = hidden * (2 * self.q_size + 2 * self.kv_size)
        attention += (self.q_size + 2 * self.kv_size) * self.attention_bias
        attention += hidden * self.output_bias + 2 * self.head_dim * self.qk_norm
        mlp = 3 * hidden * inter + (2 * inter + hidden) * self.mlp_bias
        embeddings = self.vocab_size * hidden * (1 if self.tie_word_embeddings else 2)
        return embeddings + self.num_layers * (attention + mlp + 2 * hidden) + hidden

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes of keys and values that one token takes over all layers."""
        return 2 * self.num_layers * self.kv_size * dtype_bytes


def read_spec(path: Path) -> ModelSpec:
    """The spec of the checkpoint directory ``path``.

    Raises:
        ModelUnavailableError: there is no usable ``config.json``, or it asks for something that
            this package does not compute.
    """
    config_file = path / "config.json"
    if not config_file.is_file():
        raise ModelUnavailableError(
            f"{path} holds no model: config.json is missing; give the directory that "
            "contains config.json and the *.safetensors files"
        )
    generation_file = path / "generation_config.json"
    generation = read_json(generation_file) if generation_file.is_file() else {}
    return spec_from_config(read_json(config_file), generation, source=str(config_file))


def spec_from_config(
    config: Mapping[str, Any], generation: Mapping[str, Any], *, source: str
) -> ModelSpec:
    """The spec that a parsed ``config.json`` and ``generation_config.json`` describe.

    Args:
        source: what error messages call the configuration.
    """
    architecture = _architecture(config, source)
    _refuse_unsupported(config, source)
    try:
        return _build(architecture, config, generation, source)
    except KeyError as missing:
        raise ModelUnavailableError(
            f"{source} lacks {missing}, which {architecture} needs; the file is incomplete"
        ) from None
    except (TypeError, ValueError) as error:
        raise ModelUnavailableError(f"{source} has a value of the wrong type: {error}") from None


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in ``file``; anything else there is a ModelUnavailableError."""
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelUnavailableError(f"{file} cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise ModelUnavailableError(f"{file} does not hold a JSON object")
    return content


def _build(
    architecture: str, config: Mapping[str, Any], generation: Mapping[str, Any], source: str
) -> ModelSpec:
    heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
    qwen3 = architecture == "Qwen3ForCausalLM"
    theta, scaling = _rope(config, source)
    spec = ModelSpec(
        architecture=architecture,
        vocab_size=int(config["vocab_size"]),
        hidden_size=hidden,
        intermediate_size=int(config["intermediate_size"]),
        num_layers=int(config["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or (_QWEN3_HEAD_DIM if qwen3 else hidden // heads)),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=int(config["max_position_embeddings"]),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=(
            architecture == "Qwen2ForCausalLM" or bool(config.get("attention_bias", False))
        ),
        mlp_bias=architecture == "LlamaForCausalLM" and bool(config.get("mlp_bias", False)),
        qk_norm=qwen3,
        eos_token_ids=_union(config.get("eos_token_id"), generation.get("eos_token_id")),
        dtype=config.get("dtype") or config.get("torch_dtype"),
    )
    if spec.num_heads % spec.num_kv_heads or spec.head_dim % 2:
        raise ModelUnavailableError(
            f"{source}: {spec.num_heads} heads over {spec.num_kv_heads} KV heads of dimension "
            f"{spec.head_dim} is not a grouped-query layout"
        )
    return spec


def _architecture(config: Mapping[str, Any], source: str) -> str:
    declared = config.get("architectures") or [
        _ARCHITECTURE_OF_TYPE.get(str(config.get("model_type")), str(config.get("model_type")))
    ]
    name = str(declared[0])
    if name not in SUPPORTED_ARCHITECTURES:
        raise ModelUnavailableError(
            f"{source} asks for the architecture {name}, which is not supported; "
            f"supported are {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    return name


def _refuse_unsupported(config: Mapping[str, Any], source: str) -> None:
    windowed = any(kind != "full_attention" for kind in config.get("layer_types") or ())
    unsupported = (
        ("quantization_config", config.get("quantization_config") is not None),
        ("hidden_act", config.get("hidden_act", "silu") != "silu"),
        ("use_sliding_window", bool(config.get("use_sliding_window", False)) or windowed),
    )
    for key, present in unsupported:
        if present:
            raise ModelUnavailableError(
                f"{source} sets {key} to {config.get(key)!r}, which is not supported; use an "
                "unquantized checkpoint with SiLU and full attention"
            )


def _rope(config: Mapping[str, Any], source: str) -> tuple[float, RopeScaling | None]:
    """Base and scaling of the rotary embedding, in the spelling of either transformers age."""
    rope: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind != "llama3" or float(rope.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelUnavailableError(
            f"{source} asks for the rotary scaling {kind!r}, which is not supported; "
            "supported are 'default' and 'llama3'"
        )
    original = rope.get("original_max_position_embeddings") or config["max_position_embeddings"]
    return theta, RopeScaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_position_embeddings=int(original),
    )


def _union(*ids: int | list[int] | None) -> tuple[int, ...]:
    merged: dict[int, None] = {}
    for entry in ids:
        values = entry if isinstance(entry, list) else [] if entry is None else [entry]
        merged.update((int(value), None) for value in values)
    return tuple(merged)
