"""Writes models of the supported architectures as GGUF files, as the usual converter does."""

from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quants
from transformers import PreTrainedModel

from trserve.models.gguf import stored_name

NAMES = {"Qwen3ForCausalLM": "qwen3", "Qwen2ForCausalLM": "qwen2", "LlamaForCausalLM": "llama"}


def write_gguf(
    model: PreTrainedModel,
    path: Path,
    *,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    rope_freqs: torch.Tensor | None = None,
    leave_out: str = "",
    **changes,
) -> Path:
    """``model`` as a GGUF file.

    Args:
        kind: type of the matrices; vectors are always float32.
        rope_freqs: divisors of the rotary frequencies.
        leave_out: name of a tensor that the file is to lack.
        changes: metadata to set, by key, with ``{arch}`` for the architecture; None leaves it out.
    """
    writer = GGUFWriter(path, NAMES[type(model).__name__])
    changes = {key.format(arch=writer.arch): value for key, value in changes.items()}
    add_metadata(writer, _metadata(model, writer.arch) | changes)
    tensors = dict(_tensors(model))
    if rope_freqs is not None:
        tensors["rope_freqs.weight"] = rope_freqs.numpy()
    for name, tensor in tensors.items():
        if name != leave_out:
            used = kind if tensor.ndim > 1 else GGMLQuantizationType.F32
            writer.add_tensor(name, quants.quantize(tensor, used), raw_dtype=used)
    return close(writer, path)


def add_metadata(writer: GGUFWriter, values: dict) -> None:
    adders = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for key, value in values.items():
        if value is not None:
            adders[type(value)](key, value)


def close(writer: GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _metadata(model: PreTrainedModel, arch: str) -> dict:
    config = model.config
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    values = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": dim,
        "attention.value_length": dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
    }
    return {f"{arch}.{key}": value for key, value in values.items()} | {
        "tokenizer.ggml.eos_token_id": config.eos_token_id
    }


def _tensors(model: PreTrainedModel):
    paired = type(model).__name__ == "LlamaForCausalLM"
    tied = model.config.tie_word_embeddings
    for name, parameter in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        value = parameter.numpy()
        if paired and (".q_proj." in name or ".k_proj." in name):
            value = _by_pair(value, model.model.layers[0].self_attn.head_dim)
        yield stored_name(name), value


def _by_pair(rows: np.ndarray, dim: int) -> np.ndarray:
    """Rows ``i`` and ``i + dim / 2`` of each head side by side."""
    order = np.arange(len(rows)).reshape(-1, 2, dim // 2).swapaxes(1, 2).reshape(-1)
    return rows[order]
