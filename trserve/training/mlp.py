"""Trains the networks of CITER and the edge system: confidence in the small model's token.

arXiv 2502.01976 and 2504.07878. Knows rows and labels; no engine.
"""

from __future__ import annotations

from typing import Final, Literal

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from trserve.training.curve import Held
from trserve.training.dataset import Dataset
from trserve.training.fit import Rows, Setting, fit, one_thread, outputs
from trserve.training.networks import ConfidenceMLP
from trserve.training.report import Trained

PARAMETERS: Final = {"citer": "tau", "confidence": "threshold"}


def train_mlp(
    router: Literal["citer", "confidence"],
    dataset: Dataset,
    right: torch.Tensor,
    setting: Setting,
) -> Trained:
    """The network, trained on ``right``: float32 [N], 1 where the small model's token may stay.

    What the report finds is what it should replace: rows that are not ``right``.
    """
    held = dataset.held_out(setting.held_out, setting.recipe.seed)
    training = Rows(dataset.hidden[~held], right[~held])
    other = Rows(dataset.hidden[held], right[held])
    with one_thread():
        torch.manual_seed(setting.recipe.seed)
        network = ConfidenceMLP(dataset.hidden.shape[1])
        network.standardize(training.inputs)
        fit(network, binary_cross_entropy_with_logits, training, other, setting.recipe, setting.say)
        network.fold()
        confidence = outputs(network, other.inputs).sigmoid()
    found = Held(confidence, 1.0 - other.targets, above=False)
    chosen = found.for_recall(setting.recall)
    file = f"{router}.safetensors"
    return Trained(router, PARAMETERS[router], file, network.state_dict(), found, chosen)
