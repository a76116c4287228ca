"""Everything beside the weights that makes a directory a model: configuration and tokenizer.

Knows names of files and what a GGUF file has in their place; nothing of graphs.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Final

from trserve.errors import ModelUnavailableError
from trserve.models.aliases import ResolvedModel
from trserve.models.gguf_tokenizer import read_gguf_tokenizer
from trserve.models.rope_scaling import LinearScaling, RopeScaling, YarnScaling
from trserve.models.spec import ModelSpec

_CONFIGURATION: Final = ("config.json", "generation_config.json")
_TOKENIZER: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)


def copy_beside(model: ResolvedModel, directory: Path) -> None:
    """Put the configuration and the tokenizer of ``model`` into ``directory``.

    Raises:
        ModelUnavailableError: a GGUF file has something that no ``config.json`` can say.
    """
    if model.path.suffix == ".gguf":
        _write_json(directory / "config.json", configuration_of(model.spec))
    elif model.path.suffix == ".json":
        shutil.copyfile(model.path, directory / "config.json")
    else:
        _copy(model.path, directory, _CONFIGURATION)
    if not model.own_tokenizer:
        return
    if model.tokenizer_path.suffix == ".gguf":
        _write_tokenizer(model.tokenizer_path, directory)
    else:
        _copy(model.tokenizer_path, directory, _TOKENIZER)


def _copy(source: Path, directory: Path, names: tuple[str, ...]) -> None:
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)


def _write_tokenizer(source: Path, directory: Path) -> None:
    found = read_gguf_tokenizer(source)
    found.backend.save(str(directory / "tokenizer.json"))
    settings: dict[str, Any] = dict(found.named)
    if isinstance(found.chat_template, str):
        settings["chat_template"] = found.chat_template
    elif found.chat_template:
        templates = found.chat_template.items()
        settings["chat_template"] = [{"name": name, "template": text} for name, text in templates]
    _write_json(directory / "tokenizer_config.json", settings)


def configuration_of(spec: ModelSpec) -> dict[str, Any]:
    """What ``spec_from_config`` reads as ``spec``, of a dense model."""
    return {
        "architectures": [spec.architecture],
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_parameters": _rope(spec.rope_theta, spec.rope_scaling),
        "max_position_embeddings": spec.max_position_embeddings,
        "tie_word_embeddings": spec.tie_word_embeddings,
        "attention_bias": spec.attention_bias,
        "mlp_bias": spec.mlp_bias,
        "eos_token_id": list(spec.eos_token_ids),
    }


def _rope(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """As GGUF files may have it: those of Llama 3's rule come with divisors instead."""
    if scaling is None:
        return {"rope_type": "default", "rope_theta": theta}
    if isinstance(scaling, LinearScaling):
        return {"rope_type": "linear", "rope_theta": theta, "factor": scaling.factor}
    if isinstance(scaling, YarnScaling):
        named = {name: getattr(scaling, name) for name in YarnScaling.__dataclass_fields__}
        return {"rope_type": "yarn", "rope_theta": theta, **named}
    raise ModelUnavailableError(
        "a GGUF file with frequencies of its own (rope_freqs.weight) cannot be exported: its "
        "config.json could not state them; export the model's safetensors directory"
    )


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
