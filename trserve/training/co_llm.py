"""Trains Co-LLM's deferral vector beside base models that stay as they are.

arXiv 2403.03870: first on weak labels, the large model right where the small one is wrong, with
binary cross entropy; then on the marginal likelihood, -log[(1 - P) p_small + P p_large] of the
right token, P = sigmoid(h . w). The right token is the large model's own, so the weak label is
that the tokens differ. The threshold to begin with is the paper's: the largest recall less false
alarms. Knows rows; no engine.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Final

import torch
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from trserve.training.curve import Held
from trserve.training.dataset import Dataset
from trserve.training.fit import Loss, Rows, Setting, fit, one_thread, outputs
from trserve.training.networks import DeferVector
from trserve.training.report import Trained

FILE: Final = "deferral.safetensors"
POSITIVE_WEIGHT: Final = 8.0
"""Of a weak label that says defer."""
RATES: Final = (1e-2, 1e-3)
"""Of the weak labels and of the likelihood: one vector takes larger steps than a network."""


def marginal_loss(logits: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
    """Mean of -log[(1 - P) p_small + P p_large].

    Args:
        logits: [B], of P.
        logprobs: [B, 2], of the right token under the small and the large model.
    """
    both = torch.stack([logsigmoid(-logits), logsigmoid(logits)], -1) + logprobs
    return -both.logsumexp(-1).mean()


def train_co_llm(dataset: Dataset, setting: Setting) -> Trained:
    """The vector; ``setting``'s rate is not used."""
    held = dataset.held_out(setting.held_out, setting.recipe.seed)
    weak = dataset.differs
    logprobs = torch.stack([dataset.own_logprob, dataset.peer_logprob], -1)
    weigh = torch.tensor(POSITIVE_WEIGHT)
    weak_loss = partial(binary_cross_entropy_with_logits, pos_weight=weigh)
    losses: tuple[Loss, Loss] = (weak_loss, marginal_loss)
    with one_thread():
        network = DeferVector(dataset.hidden.shape[1])
        for loss, targets, rate in zip(losses, (weak, logprobs), RATES, strict=True):
            training = Rows(dataset.hidden[~held], targets[~held])
            other = Rows(dataset.hidden[held], targets[held])
            recipe = replace(setting.recipe, rate=rate, weight_decay=0.0)
            fit(network, loss, training, other, recipe, setting.say)
        scores = outputs(network, dataset.hidden[held]).sigmoid()
    found = Held(scores, weak[held], above=True)
    return Trained("co-llm", "eta", FILE, network.state_dict(), found, found.by_youden())
