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
from trserve.models.rope_scaling import RopeScaling, longest_position, rope_from_config

SUPPORTED_ARCHITECTURES = (
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen2ForCausalLM",
    "LlamaForCausalLM",
)

_ARCHITECTURE_OF_TYPE = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "llama": "LlamaForCausalLM",
}

_QWEN3_HEAD_DIM = 128
"""Qwen3 configurations that leave ``head_dim`` out mean 128, whatever the hidden size."""


@dataclass(frozen=True)
class ExpertsSpec:
    """The mixture of experts that replaces the MLP in some layers.

    Of ``count`` experts each token takes the ``active`` most probable ones; with ``normalized``
    their probabilities are scaled to a sum of one. ``layers`` are the layers that have experts.
    """

    count: int
    active: int
    intermediate_size: int
    normalized: bool
    layers: tuple[int, ...]

    def num_parameters(self, hidden_size: int) -> int:
        """Number of weights in one layer's experts and their router."""
        return self.count * hidden_size * (3 * self.intermediate_size + 1)


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
    experts: ExpertsSpec | None = None

    def has_experts(self, layer: int) -> bool:
        """Whether ``layer`` has a mixture of experts instead of one MLP."""
        return self.experts is not None and layer in self.experts.layers

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
        total = embeddings + self.num_layers * (attention + mlp + 2 * hidden) + hidden
        if self.experts is not None:
            sparse = self.experts.num_parameters(hidden) - mlp
            total += len(self.experts.layers) * sparse
        return total

    @property
    def active_parameters(self) -> int:
        """Number of weights that a token meets: of the experts only those that it is sent to."""
        if self.experts is None:
            return self.num_parameters
        idle = self.experts.count - self.experts.active
        one = 3 * self.hidden_size * self.experts.intermediate_size
        return self.num_parameters - len(self.experts.layers) * idle * one

    def weight_bytes(self, dtype_bytes: int, *, int8: bool = False) -> int:
        """Bytes that the loaded weights take at most; the head is kept in a second layout too.

        With ``int8`` everything but the embedding takes a byte a weight.
        """
        if int8:
            return self.num_parameters + dtype_bytes * self.vocab_size * self.hidden_size
        return dtype_bytes * (self.num_parameters + self.vocab_size * self.hidden_size)

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes of keys and values that one token takes over all layers."""
        return 2 * self.num_layers * self.kv_size * dtype_bytes


def read_spec(path: Path) -> ModelSpec:
    """The spec of ``path``: a checkpoint directory, a GGUF file, or a configuration alone (JSON).

    Raises:
        ModelUnavailableError: there is no usable ``config.json``, or it asks for something that
            this package does not compute.
    """
    if path.suffix == ".gguf":
        from trserve.models.gguf_spec import read_gguf_spec

        return read_gguf_spec(path)
    if path.suffix == ".json":
        return spec_from_config(read_json(path), {}, source=str(path))
    config_file = path / "config.json"
    if not config_file.is_file():
        raise ModelUnavailableError(
            f"{path} holds no model: config.json is missing; give the directory that contains "
            "config.json and the *.safetensors files, or a *.gguf file"
        )
    generation_file = path / "generation_config.json"
    generation = read_json(generation_file) if generation_file.is_file() else {}
    return spec_from_config(
        read_json(config_file),
        generation,
        source=str(config_file),
        generation_source=str(generation_file),
    )


def spec_from_config(
    config: Mapping[str, Any],
    generation: Mapping[str, Any],
    *,
    source: str,
    generation_source: str = "generation_config.json",
) -> ModelSpec:
    """The spec that a parsed ``config.json`` and ``generation_config.json`` describe.

    Args:
        source: what error messages call the configuration.
        generation_source: what they call the other file.
    """
    architecture = _architecture(config, source)
    _refuse_unsupported(config, source)
    ends = (*_eos_ids(config, source), *_eos_ids(generation, generation_source))
    try:
        return _build(architecture, config, tuple(dict.fromkeys(ends)), source)
    except KeyError as missing:
        raise ModelUnavailableError(
            f"{source} lacks {missing}, which {architecture} needs; the file is incomplete"
        ) from None
    except (TypeError, ValueError, ArithmeticError) as error:
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
    architecture: str, config: Mapping[str, Any], ends: tuple[int, ...], source: str
) -> ModelSpec:
    heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
    qwen3 = architecture in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
    theta, scaling = rope_from_config(config, source)
    layers = int(config["num_hidden_layers"])
    spec = ModelSpec(
        architecture=architecture,
        vocab_size=int(config["vocab_size"]),
        hidden_size=hidden,
        intermediate_size=int(config["intermediate_size"]),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or _default_head_dim(architecture, hidden, heads)),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=longest_position(scaling, int(config["max_position_embeddings"])),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=(
            architecture == "Qwen2ForCausalLM" or bool(config.get("attention_bias", False))
        ),
        mlp_bias=architecture == "LlamaForCausalLM" and bool(config.get("mlp_bias", False)),
        qk_norm=qwen3,
        eos_token_ids=ends,
        dtype=config.get("dtype") or config.get("torch_dtype"),
        experts=_experts(config, layers) if architecture == "Qwen3MoeForCausalLM" else None,
    )
    check_layout(spec, source)
    return spec


def check_layout(spec: ModelSpec, source: str) -> None:
    """Refuse a spec whose numbers do not fit together."""
    if spec.num_heads % spec.num_kv_heads or spec.head_dim % 2:
        raise ModelUnavailableError(
            f"{source}: {spec.num_heads} heads over {spec.num_kv_heads} KV heads of dimension "
            f"{spec.head_dim} is not a grouped-query layout"
        )
    experts = spec.experts
    if experts is not None and not 0 < experts.active <= experts.count:
        raise ModelUnavailableError(
            f"{source}: a token cannot take {experts.active} of {experts.count} experts"
        )


def _default_head_dim(architecture: str, hidden: int, heads: int) -> int:
    return _QWEN3_HEAD_DIM if architecture == "Qwen3ForCausalLM" else hidden // heads


def _experts(config: Mapping[str, Any], layers: int) -> ExpertsSpec:
    dense = set(config.get("mlp_only_layers") or ())
    step = int(config.get("decoder_sparse_step") or 1)
    return ExpertsSpec(
        count=int(config.get("num_experts") or config["num_local_experts"]),
        active=int(config["num_experts_per_tok"]),
        intermediate_size=int(config["moe_intermediate_size"]),
        normalized=bool(config.get("norm_topk_prob", False)),
        layers=tuple(i for i in range(layers) if i not in dense and (i + 1) % step == 0),
    )


def _architecture(config: Mapping[str, Any], source: str) -> str:
    model_type = str(config.get("model_type"))
    declared = _list(config, "architectures", source)
    name = str(declared[0]) if declared else _ARCHITECTURE_OF_TYPE.get(model_type, model_type)
    if name not in SUPPORTED_ARCHITECTURES:
        raise ModelUnavailableError(
            f"{source} asks for the architecture {name}, which is not supported; "
            f"supported are {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    return name


def _refuse_unsupported(config: Mapping[str, Any], source: str) -> None:
    windowed = any(kind != "full_attention" for kind in _list(config, "layer_types", source))
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


def _list(config: Mapping[str, Any], key: str, source: str) -> list[Any]:
    """The list ``key``; empty where there is none."""
    found = config.get(key) or []
    if not isinstance(found, list):
        raise ModelUnavailableError(f"{source}: {key} should be a list, and is {found!r}")
    return found


def _eos_ids(config: Mapping[str, Any], source: str) -> list[int]:
    """The ids that end a text by one file, which names one or several."""
    entry = config.get("eos_token_id")
    values = entry if isinstance(entry, list) else [] if entry is None else [entry]
    try:
        return [int(value) for value in values]
    except (TypeError, ValueError, OverflowError):
        raise ModelUnavailableError(
            f"{source}: eos_token_id should be an id or a list of ids, and is {entry!r}"
        ) from None
