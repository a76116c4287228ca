"""Trains R2R's network: which of the small model's tokens make the large one end elsewhere.

arXiv 2505.21600. Knows rows and labels; no engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from trserve.training.curve import Held
from trserve.training.dataset import Dataset
from trserve.training.fit import Rows, Setting, fit, one_thread, outputs
from trserve.training.networks import R2R_CLASS, R2RClassifier
from trserve.training.report import Trained

FILE: Final = "default_router.safetensors"


@dataclass(frozen=True)
class Shape:
    """Of the network; the paper's is ``(1024,) * 6`` with an expansion of 4."""

    dims: Sequence[int] = (128, 128)
    expansion: int = 4
    dropout: float = 0.1


def train_r2r(
    dataset: Dataset,
    divergent: torch.Tensor,
    embedding: torch.Tensor,
    shape: Shape,
    setting: Setting,
) -> Trained:
    """The network of ``shape``, trained on ``divergent`` (float32 [N]).

    Args:
        embedding: [V, H], the small model's input embedding.
    """
    hidden, num_logits = dataset.hidden.shape[1], dataset.top_logits.shape[1]
    inputs = torch.cat(
        [dataset.hidden.float(), embedding.float()[dataset.tokens], dataset.top_logits], -1
    )
    held = dataset.held_out(setting.held_out, setting.recipe.seed)
    training, other = Rows(inputs[~held], divergent[~held]), Rows(inputs[held], divergent[held])
    with one_thread():
        torch.manual_seed(setting.recipe.seed)
        network = R2RClassifier(hidden, num_logits, shape.dims, shape.expansion, shape.dropout)
        network.standardize(training.inputs)
        fit(network, binary_cross_entropy_with_logits, training, other, setting.recipe, setting.say)
        network.fold()
        found = Held(outputs(network, other.inputs).sigmoid(), other.targets, above=True)
    chosen = found.for_recall(setting.recall)
    facts = _facts(hidden, num_logits, shape)
    tensors = network.state_dict()
    return Trained("r2r", "threshold", FILE, tensors, found, chosen, facts)


def _facts(hidden: int, num_logits: int, shape: Shape) -> dict[str, Any]:
    return {
        "model_type": R2R_CLASS,
        "init_args": {
            "hidden_states_size": hidden,
            "logits_size": num_logits,
            "hidden_dims": list(shape.dims),
            "expansion_factor": shape.expansion,
            "dropout_rate": shape.dropout,
            "use_position_embedding": False,
            "normalize_input": False,
        },
        "input_type": ["hidden_states", "token", "logits"],
    }
