"""The feed-forward half of a layer: one gated MLP, or a mixture of such experts.

Knows weights and arithmetic; nothing of attention, requests or files. Either computes a token from
that token alone: which others share the step changes at most roundings.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from trserve.models.buffers import StepBuffers
from trserve.models.layers import Linear, RMSNorm


class DenseMlp:
    """``down(silu(gate(norm(x))) * up(norm(x)))`` (Shazeer, 2020), gate and up fused in one."""

    __slots__ = ("down", "gate_up", "norm")

    def __init__(self, norm: RMSNorm, gate_up: Linear, down: Linear) -> None:
        self.norm = norm
        self.gate_up = gate_up
        self.down = down

    def add_to(self, x: torch.Tensor, buffers: StepBuffers) -> None:
        """Add the MLP of ``x`` [T, hidden_size] to ``x``."""
        self.gate_up.into(buffers.norm_of(self.norm, x), buffers.gate_up)
        self.down.add_to(x, functional.silu(buffers.gate, inplace=True).mul_(buffers.up))


class Expert:
    """One expert: a gated MLP without a norm of its own."""

    __slots__ = ("_down", "_gate_up")

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self._gate_up = gate_up
        self._down = down

    def into(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Write the MLP of ``rows`` [n, hidden_size] to ``out``."""
        gate, up = self._gate_up(rows).chunk(2, -1)
        self._down.into(functional.silu(gate, inplace=True).mul_(up), out)


class SparseMlp:
    """A mixture of experts, of which each token takes the most probable ones.

    The (token, expert) pairs of a step are sorted by expert, so that an expert's weights are read
    once per step, for all of its tokens, and the weights of the others not at all.

    Args:
        router: to one logit for each of ``experts``.
        active: experts per token.
        normalized: whether the probabilities of a token's experts are scaled to a sum of one.

    Attributes:
        reduce: where every expert here is a part of one, what adds the other parts, in place.
    """

    __slots__ = ("_active", "_experts", "_normalized", "_router", "norm", "reduce")

    def __init__(
        self,
        norm: RMSNorm,
        router: Linear,
        experts: list[Expert],
        *,
        active: int,
        normalized: bool,
    ) -> None:
        self.norm = norm
        self._router = router
        self._experts = experts
        self._active = active
        self._normalized = normalized
        self.reduce: Callable[[torch.Tensor], None] | None = None

    def add_to(self, x: torch.Tensor, buffers: StepBuffers) -> None:
        """Add the mixture for ``x`` [T, hidden_size] to ``x``."""
        normed = buffers.norm_of(self.norm, x)
        weights, chosen = self._route(normed)
        by_expert = chosen.argsort(stable=True)
        computed = self._run_experts(normed, chosen, by_expert)
        by_token = torch.empty_like(computed).index_copy_(0, by_expert, computed)
        # In float32, and in the order of a token's own choices: neighbours change nothing.
        parts = by_token.view(len(x), self._active, -1) * weights.unsqueeze(-1)
        total = parts.sum(1)
        if self.reduce is not None:
            self.reduce(total)
        x.add_(total)

    def _route(self, normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights, float32 [T, active], and chosen experts, int64 [T * active]."""
        probabilities = torch.softmax(self._router(normed), -1, dtype=torch.float32)
        weights, chosen = probabilities.topk(self._active, dim=-1)
        if self._normalized:
            weights /= weights.sum(-1, keepdim=True)
        return weights, chosen.flatten()

    def _run_experts(
        self, normed: torch.Tensor, chosen: torch.Tensor, by_expert: torch.Tensor
    ) -> torch.Tensor:
        """Outputs of all pairs, sorted by expert, [T * active, hidden_size]."""
        rows = normed.index_select(0, by_expert // self._active)
        out = torch.empty_like(rows)
        counts = torch.bincount(chosen, minlength=len(self._experts)).tolist()
        first = 0
        for expert, count in zip(self._experts, counts, strict=True):
            if count:
                pairs = slice(first, first + count)
                expert.into(rows[pairs], out[pairs])
                first += count
        return out
