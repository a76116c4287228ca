"""The operations that a decoder and its sampling need on a GPU, one function each.

Each runs a Triton kernel on CUDA tensors and a torch reference (``ops_reference``) on CPU tensors;
with ``TRITON_INTERPRET=1`` CPU tensors too go through the kernels, interpreted. Neither triton nor
a driver is touched before a kernel is needed.

All may be captured in a CUDA graph: no shape depends on data, nothing waits for the device, and
what varies from step to step is read from tensors. Arithmetic is in float32, of probabilities in
float64, whatever the tensors hold; a result is rounded once, to the dtype it is stored in.

Tensors are contiguous, but for logits, whose rows may lie further apart.

Knows tensors; nothing of layers, requests or graphs.
"""

from __future__ import annotations

import importlib.util
import os
from functools import cache
from typing import Final

import torch

from trserve.errors import ModelUnavailableError
from trserve.models.cuda import ops_reference as reference
from trserve.models.cuda.ops_rows import NO_TOKEN as NO_TOKEN
from trserve.models.cuda.ops_rows import Epilogue as Epilogue
from trserve.models.cuda.ops_rows import Filters as Filters

INTERPRETED: Final = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton runs its kernels by interpreting them: read once, as triton does."""


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` (Zhang and Sennrich, 2019) of [T, hidden].

    Returns ``out``, of any floating dtype; a new tensor in the dtype of ``x`` without one.
    """
    out = torch.empty_like(x) if out is None else out
    if _by_kernel(x):
        from trserve.models.cuda import kernels

        kernels.rms_norm(x, weight, eps, out)
    else:
        reference.rms_norm(x, weight, eps, out)
    return out


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """``silu(gate) * up`` [T, I] of [T, 2 I], gate first (Shazeer, 2020)."""
    if out is None:
        out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
    if _by_kernel(gate_up):
        from trserve.models.cuda import kernels

        kernels.silu_mul(gate_up, out)
    else:
        reference.silu_mul(gate_up, out)
    return out


def rope_and_store(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    rotations: torch.Tensor,
    kv: torch.Tensor,
    q: torch.Tensor,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Normalise and rotate queries and keys; write queries to ``q``, keys and values to the cache.

    Queries are not scaled: attention does that.

    Args:
        qkv: [T, kv_heads, group + 2, head_dim]: for each KV head the queries that share it, its
            key, its value, with rotary pairs (2i, 2i + 1) side by side.
        positions: integer [T], below the length of ``rotations``.
        slots: integer [T], ``block * block_size + offset``; nothing is stored for a negative one,
            which is how padding leaves the dummy block zero.
        rotations: float32 [L, head_dim / 2, 2], cosine and sine of each pair by position: the real
            view of :class:`trserve.models.rope.RotaryTable`.
        kv: one layer's cache, [blocks, 2, kv_heads, block_size, head_dim].
        q: [T, heads, head_dim], in the dtype that attention takes.
        q_norm: weight [head_dim] of the norm of each query (Qwen3), pairs side by side; None for
            no norm. ``k_norm`` likewise for keys.
    """
    if _by_kernel(qkv):
        from trserve.models.cuda import kernels

        kernels.rope_and_store(qkv, positions, slots, rotations, kv, q, q_norm, k_norm, eps)
    else:
        reference.rope_and_store(qkv, positions, slots, rotations, kv, q, q_norm, k_norm, eps)


def epilogue(logits: torch.Tensor, tokenizer_size: int, out: Epilogue) -> None:
    """Fill ``out`` from the first ``tokenizer_size`` columns of ``logits`` [B, V or more]."""
    if _by_kernel(logits):
        from trserve.models.cuda import kernels_logits

        kernels_logits.epilogue(logits, tokenizer_size, out)
    else:
        reference.epilogue(logits, tokenizer_size, out)


def uniform(
    seeds: torch.Tensor, positions: torch.Tensor, model: int, purpose: int, out: torch.Tensor
) -> None:
    """Fill ``out``, float64 [B], with the numbers of ``workers.random_numbers``, to the bit.

    Args:
        seeds: int64 [B], the bits of the requests' unsigned seeds.
        positions: integer [B], of the token that the number is for.
        model: index of the model that draws.
        purpose: ``PURPOSE_SAMPLE`` and its like.
    """
    if _by_kernel(seeds):
        from trserve.models.cuda import kernels_logits

        kernels_logits.uniform(seeds, positions, model, purpose, out)
    else:
        reference.uniform(seeds, positions, model, purpose, out)


def sample(
    logits: torch.Tensor,
    tokenizer_size: int,
    best: Epilogue,
    temperatures: torch.Tensor,
    numbers: torch.Tensor,
    out: torch.Tensor,
    filters: Filters | None = None,
) -> None:
    """Choose one token a row, by the definition of :class:`trserve.workers.sampler.Sampler`.

    Rows with a temperature below ``GREEDY_BELOW`` take the arg max; others the first index at which
    the cumulative sum, in vocabulary order and float64, of the filtered
    ``softmax(logits / temperature)`` exceeds its number of the total. Parallel sums round unlike
    sequential ones: a number within about 1e-15 of a boundary may fall to the neighbour. A number
    that rounding takes up to the total falls to the last token of positive weight.

    Args:
        logits: [B, V or more]; columns from ``tokenizer_size`` on are never chosen.
        best: what :func:`epilogue` found in the same logits.
        temperatures: float64 [B].
        numbers: float64 [B], of :func:`uniform`.
        out: integer [B]; ``NO_TOKEN`` for rows that are not finite.
        filters: top_k, top_p and min_p, in that order, ties kept; None, where no row has any, is
            several times as fast.
    """
    if _by_kernel(logits):
        from trserve.models.cuda import kernels_sampling

        kernels_sampling.sample(logits, tokenizer_size, best, temperatures, numbers, out, filters)
    else:
        reference.sample(logits, tokenizer_size, best, temperatures, numbers, out, filters)


def take_ids(ids: torch.Tensor, sources: torch.Tensor) -> None:
    """Put the id that lies at ``sources[i]`` into ``ids[i]``, where that is not 0.

    What lies there may be another process's or the host's to write, so it is read anew by every
    launch. Sources of tensors on the CPU are addresses in this process.

    Args:
        ids: int64 [T].
        sources: int64 [T], device pointers of int32, each readable; 0: the id stays.
    """
    if _by_kernel(ids):
        from trserve.models.cuda import kernels

        kernels.take_ids(ids, sources)
    else:
        reference.take_ids(ids, sources)


def _by_kernel(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` goes to a Triton kernel."""
    if not (tensor.is_cuda or INTERPRETED):
        return False
    require_triton()
    return True


@cache
def require_triton() -> None:
    """Refuse to go on without triton.

    Raises:
        ModelUnavailableError: it cannot be imported.
    """
    if importlib.util.find_spec("triton") is None:
        raise ModelUnavailableError(
            "--device cuda needs triton, which is not installed here; CUDA builds of torch bring "
            "it, else install the extra: pip install 'trserve[gpu-test]'"
        )
    if INTERPRETED:
        from trserve.models.cuda.interpreting import allow_loops

        allow_loops()
