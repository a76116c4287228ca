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
from trserve.demo.words import listed

HEAD_DIM: Final = 32
VOCAB_MULTIPLE: Final = 16
ARCHITECTURE_KEYS: Final = listed(
    "attention_bias attention_dropout bos_token_id eos_token_id head_dim hidden_act hidden_size "
    "initializer_range intermediate_size layer_types max_position_embeddings model_type "
    "num_attention_heads num_hidden_layers num_key_value_heads pad_token_id rms_norm_eps "
    "rope_parameters sliding_window tie_word_embeddings transformers_version "
    "use_sliding_window vocab_size"
)


@dataclass(frozen=True, slots=True)
class Phase:
    """One learning-rate cycle, which begins at the previous one's checkpoint.

    ``drill`` is the share of drill documents, ``drill_end`` the share near the phase's end;
    ``first`` is the share of first messages among the others. The rate falls linearly over the
    last ``decay`` of the steps.
    """

    steps: int
    drill: float
    drill_end: float
    decay: float = 0.35
    first: float = 0.0


@dataclass(frozen=True, slots=True)
class Recipe:
    """Shape and training of one model."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    feed_forward: int
    bfloat16: bool
    phases: tuple[Phase, ...]

    @property
    def steps(self) -> int:
        """Optimiser steps of all phases."""
        return sum(phase.steps for phase in self.phases)


# The LLM learns arithmetic from drills first, then how to copy names it has never seen. The SLM
# stops short on purpose: 1000 steps more and it makes hardly a mistake that an LLM could mend.
# Both end on a phase in which the messages that people try first are frequent.
RECIPES: Final[dict[PairModel, Recipe]] = {
    "tiny": Recipe(
        *(2, 96, 3, 1, 256),
        bfloat16=False,
        phases=(Phase(2600, 0.3, 0.1), Phase(200, 0.1, 0.1, decay=1.0, first=0.15)),
    ),
    "small": Recipe(
        *(4, 192, 6, 2, 512),
        bfloat16=True,
        phases=(
            Phase(2000, 0.5, 0.15),
            Phase(1000, 0.15, 0.05, decay=1.0),
            Phase(600, 0.05, 0.05, decay=1.0, first=0.15),
        ),
    ),
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
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config)
    _initialise(model, recipe)
    return prepare_for_training(model)


def _initialise(model: Any, recipe: Recipe) -> None:
    """N(0, 1/hidden); what writes to the residual stream is scaled down by its depth."""
    for name, parameter in model.named_parameters():
        if parameter.ndim != 2:
            continue
        scale = recipe.hidden**-0.5
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            scale /= math.sqrt(2 * recipe.layers)
        torch.nn.init.normal_(parameter, std=scale)


def prepare_for_training(model: Any) -> Any:
    """``model`` in training mode, with the attention that is fast on CPUs."""
    model.config._attn_implementation = attention.register()
    return model.train()


def write_checkpoint(model: Any, directory: Path) -> None:
    """Writes config.json, generation_config.json and bfloat16 model.safetensors."""
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "config.json", _config_file(model.config))
    generation = {"do_sample": False, "eos_token_id": [EOS_ID], "pad_token_id": PAD_ID}
    _write_json(directory / "generation_config.json", generation)
    weights = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # tied to the embedding; loaders tie it again
    }
    path = directory / "model.safetensors"
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors makes it private, and an installed copy would stay so


def _config_file(config: Any) -> dict[str, Any]:
    """config.json: the architecture only, readable by transformers 4 (rope_theta) and 5."""
    values = config.to_dict()
    kept = {key: value for key, value in values.items() if key in ARCHITECTURE_KEYS}
    return kept | {
        "architectures": ["Qwen3ForCausalLM"],
        "dtype": "bfloat16",
        "rope_theta": values["rope_parameters"]["rope_theta"],
        "use_cache": True,
    }


def load_checkpoint(directory: Path) -> Any:
    """The model of ``directory`` in float32, ready for inference."""
    model: Any = Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model.eval()


def _write_json(path: Path, value: dict[str, Any]) -> None:
    text = json.dumps(value, indent=2, sort_keys=True) + "\n"
    path.write_text(text, encoding="utf-8")
