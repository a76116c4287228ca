"""Muon for the matrices, AdamW for embeddings and norms, one warm-up-stable-decay schedule.

Muon: Jordan et al., 2024 (orthogonalised momentum); here torch.optim's. Knows no data.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import nn

MUON_LR: Final = 0.02
ADAM_LR: Final = 3e-3
WEIGHT_DECAY: Final = 0.05
WARMUP_STEPS: Final = 40
FINAL_LR_SHARE: Final = 0.01
CLIP_NORM: Final = 1.0


def learning_rate_share(step: int, steps: int, decay: float) -> float:
    """Warm up, hold, then fall linearly to 1 % over the last ``decay`` of ``steps``."""
    warm = min(1.0, (step + 1) / WARMUP_STEPS)
    left = (steps - step) / (decay * steps)
    return min(warm, max(FINAL_LR_SHARE, min(1.0, left)))


class MuonAdamW:
    """Both optimisers behind one ``step``; gradients are clipped to norm 1 together."""

    def __init__(self, model: nn.Module, steps: int, decay: float) -> None:
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        embeddings = [p for name, p in named if "embed" in name]
        matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
        vectors = [p for _, p in named if p.ndim == 1]
        self._parameters = [*embeddings, *matrices, *vectors]
        self._steps = steps
        self._decay = decay
        self._optimisers = (
            torch.optim.Muon(
                matrices,
                lr=MUON_LR,
                momentum=0.95,
                nesterov=True,
                weight_decay=WEIGHT_DECAY,
                adjust_lr_fn="original",
            ),
            torch.optim.AdamW(
                [
                    {"params": embeddings, "weight_decay": WEIGHT_DECAY},
                    {"params": vectors, "weight_decay": 0.0},
                ],
                lr=ADAM_LR,
                betas=(0.9, 0.98),
            ),
        )

    def step(self, step: int) -> None:
        """Applies and clears the gradients; ``step`` counts from 0."""
        nn.utils.clip_grad_norm_(self._parameters, CLIP_NORM)
        share = learning_rate_share(step, self._steps, self._decay)
        for optimiser, base in zip(self._optimisers, (MUON_LR, ADAM_LR), strict=True):
            for group in optimiser.param_groups:
                group["lr"] = base * share
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
