"""The two architectures of the pair: their shapes, initialisation and checkpoint files.

Standard ``Qwen3ForCausalLM`` checkpoints, readable by anything that reads those. Knows no data.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from trserve.demo import PairModel, attention
from trserve.demo.tokenizer_build import EOS_ID, MAX_CONTEXT, PAD_ID

HEAD_DIM: Final = 32
VOCAB_MULTIPLE: Final = 16


@dataclass(frozen=True, slots=True)
class Recipe:
    """Shape and training of one model; ``drill`` and ``drill_end`` are shares of documents."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    feed_forward: int
    steps: int
    drill: float
    drill_end: float
    bfloat16: bool


RECIPES: Final[dict[PairModel, Recipe]] = {
    "tiny": Recipe(2, 96, 3, 1, 256, 2600, drill=0.3, drill_end=0.1, bfloat16=False),
    "small": Recipe(4, 192, 6, 2, 512, 2000, drill=0.5, drill_end=0.15, bfloat16=True),
}


def build_model(recipe: Recipe, vocab: int, seed: int) -> Any:
    """A freshly initialised float32 model for a tokenizer of ``vocab`` ids (rows are padded)."""
    config = Qwen3Config(
        vocab_size=-(-vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE,
        hidden_size=recipe.hidden,
        intermediate_size=recipe.feed_forward,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )
    config._attn_implementation = attention.register()
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config)
    _initialise(model, recipe)
    return model


def _initialise(model: Any, recipe: Recipe) -> None:
    """N(0, 1/hidden); what writes to the residual stream is scaled down by its depth."""
    for name, parameter in model.named_parameters():
        if parameter.ndim != 2:
            continue
        scale = recipe.hidden**-0.5
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            scale /= math.sqrt(2 * recipe.layers)
        torch.nn.init.normal_(parameter, std=scale)


def write_checkpoint(model: Any, directory: Path) -> None:
    """Writes config.json, generation_config.json and bfloat16 model.safetensors."""
    directory.mkdir(parents=True, exist_ok=True)
    config = model.config.to_dict() | {
        "architectures": ["Qwen3ForCausalLM"],
        "dtype": "bfloat16",
        "use_cache": True,
    }
    _write_json(directory / "config.json", config)
    generation = {"do_sample": False, "eos_token_id": [EOS_ID], "pad_token_id": PAD_ID}
    _write_json(directory / "generation_config.json", generation)
    weights = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # tied to the embedding; loaders tie it again
    }
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def load_checkpoint(directory: Path) -> Any:
    """The model of ``directory`` in float32, ready for inference."""
    model: Any = Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model.eval()


def _write_json(path: Path, value: dict[str, Any]) -> None:
    text = json.dumps(value, indent=2, sort_keys=True) + "\n"
    path.write_text(text, encoding="utf-8")
