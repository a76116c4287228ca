"""Causal attention in float32 under bfloat16 autocast, for training on CPUs.

The CPU's fused attention is several times slower in bfloat16 than in float32 at these sizes,
while the matrix products around it are several times faster. Knows no model.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

FLOAT32_ATTENTION: Final = "sdpa_float32"


def _float32_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """As transformers' "sdpa"; query (batch, heads, length, head_dim), key and value alike."""
    with torch.autocast(query.device.type, enabled=False):
        return sdpa_attention_forward(
            module, query.float(), key.float(), value.float(), attention_mask, **kwargs
        )


def register() -> str:
    """Makes the implementation known to transformers; returns its name for the config."""
    AttentionInterface.register(FLOAT32_ATTENTION, _float32_attention)
    AttentionMaskInterface.register(FLOAT32_ATTENTION, sdpa_mask)
    return FLOAT32_ATTENTION
