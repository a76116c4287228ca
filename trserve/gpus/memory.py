"""How many tokens of KV cache models can have beside each other on the GPUs of a placement.

A request that visits several models holds KV of its whole row in each, so they all get the same
number of tokens, up to what each can use: more in one of them would never be used. A GPU that
several models share must hold the sum of what they take of it. Pure arithmetic over bytes: knows
no driver, no file and no flag.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple

from trserve.models.spec import ModelSpec

_MIB: Final = 2**20

CONTEXT: Final = 640 * _MIB
"""Of a process on a GPU: its CUDA context, loaded kernels and library workspaces. An estimate."""
GRAPHS: Final = 512 * _MIB
"""The pool that a process's captured graphs share. An estimate."""
PLAN: Final = 8 * _MIB
"""Of flashinfer's plans, beside their partial results (its documentation)."""
RESERVE_SHARE: Final = 20
"""One part in so many of a GPU's free memory is left alone: for the MPS server, for what does not
fit between allocations, and for everybody else."""
LIMIT_SHARE: Final = 100
"""One part in so many is left of a GPU's free memory by the limits of its processes, which end one
that passes its own: most of the reserve is theirs, since what they take is an estimate."""

_LOGITS_WIDTH: Final = 4 + 4 + 2
"""Bytes that a logit takes during a step: as float32, once more while probabilities are worked
out, and as it comes from the head."""


class Need(NamedTuple):
    """What one model takes of each of its GPUs; all sizes in bytes.

    Attributes:
        name: what to call it.
        gpus: the numbers of its GPUs, a process on each.
        weights: of the process that holds most.
        fixed: everything else that does not grow with the KV cache.
        per_token: of KV.
        most_tokens: how many it can use, a whole number of blocks.
    """

    name: str
    gpus: tuple[int, ...]
    weights: int
    fixed: int
    per_token: int
    most_tokens: int

    def size(self, tokens: int) -> int:
        """With ``tokens`` of KV, or all that it can use if that is less."""
        return self.weights + self.fixed + min(tokens, self.most_tokens) * self.per_token


def rank_weight_bytes(spec: ModelSpec, width: int, tp: int) -> int:
    """Bytes of weights in the first of ``tp`` processes, which holds most.

    The layers are divided; the embedding is whole everywhere, and the head, if it is another
    tensor, is whole in the first process (see ``models/sharding.py``). ``width`` bytes a weight.
    """
    embedding = spec.vocab_size * spec.hidden_size
    head = 0 if spec.tie_word_embeddings else embedding
    layers = spec.num_parameters - embedding - head
    return width * (-(-layers // tp) + embedding + head)


def activation_bytes(spec: ModelSpec, width: int, tp: int, *, tokens: int, rows: int) -> int:
    """At most, during a step of ``tokens`` of which ``rows`` are sampled from.

    The residual stream and its normed copy, in and out; projections of attention; gate, up and
    their product; logits.
    """
    attention = 2 * (spec.q_size + 2 * spec.kv_size) // tp
    inter = spec.intermediate_size if spec.experts is None else spec.experts.intermediate_size
    active = 1 if spec.experts is None else spec.experts.active
    streams = 4 * spec.hidden_size + attention + 3 * max(1, active) * inter // tp
    return tokens * streams * width + rows * spec.vocab_size * _LOGITS_WIDTH


def attention_bytes(spec: ModelSpec, tp: int, *, tokens: int, rows: int) -> int:
    """flashinfer's workspaces in each of ``tp`` processes, for steps of up to so many.

    As the process itself will work them out, but for a GPU as large as there is.
    """
    # Not with this file, which every process of a server without GPUs imports.
    from trserve.models.cuda.attention_workspace import MOST_PROCESSORS, Heads, workspace_bytes
    from trserve.workers.cuda.buckets import Buckets

    kv_heads = max(1, spec.num_kv_heads // tp)
    heads = Heads(max(kv_heads, spec.num_heads // tp), kv_heads, spec.head_dim)
    shapes = Buckets.of(max_rows=rows, max_tokens=tokens).largest_first
    return workspace_bytes(heads, MOST_PROCESSORS, shapes) + PLAN


def room_of(free: int) -> int:
    """Bytes of a GPU with ``free`` bytes that may be planned with."""
    return free - free // RESERVE_SHARE


def limits_of(free: int) -> int:
    """Bytes of a GPU with ``free`` bytes that the limits of its processes may add up to."""
    return free - free // LIMIT_SHARE


def used(needs: Sequence[Need], tokens: int, gpu: int) -> int:
    """Bytes that all models together take of ``gpu``."""
    return sum(need.size(tokens) for need in needs if gpu in need.gpus)


def fits(needs: Sequence[Need], room: Mapping[int, int], tokens: int, kv_most: int = 0) -> bool:
    """Whether every GPU in ``room`` holds what its models take with ``tokens`` of KV each.

    ``kv_most`` bounds the bytes of all KV caches together, over all GPUs; 0 for no bound.
    """
    if kv_most and _all_kv(needs, tokens) > kv_most:
        return False
    return all(used(needs, tokens, gpu) <= most for gpu, most in room.items())


def _all_kv(needs: Sequence[Need], tokens: int) -> int:
    return sum(min(tokens, n.most_tokens) * n.per_token * len(n.gpus) for n in needs)


def common_tokens(
    needs: Sequence[Need], room: Mapping[int, int], block: int, kv_most: int = 0
) -> int | None:
    """The largest number of tokens, a multiple of ``block``, that all models can hold at once.

    A model that cannot use that many gets what it can use. None where not even the weights fit.
    """
    if not fits(needs, room, 0, kv_most):
        return None
    low, high = 0, max(need.most_tokens for need in needs) // block
    while (
        low < high
    ):  # what is taken grows with the tokens, so the last that fits can be halved for
        middle = (low + high + 1) // 2
        low, high = (
            (middle, high) if fits(needs, room, middle * block, kv_most) else (low, middle - 1)
        )
    return low * block


def process_limits(
    needs: Sequence[Need], tokens: Sequence[int], room: Mapping[int, int], clients: Collection[int]
) -> list[int]:
    """Bytes that each process of a model may take of its GPU, 0 for those that are not limited.

    What a GPU has left is shared out evenly among its models, so that limits leave room for what
    an estimate missed and still never exceed the GPU together. Whole MiB, the unit of MPS.

    Args:
        tokens: of KV, of each model.
        room: bytes of each GPU that they may add up to (:func:`limits_of`).
        clients: indices of the models whose process is limited.
    """
    sizes = [need.size(count) for need, count in zip(needs, tokens, strict=True)]
    spare = {}
    for gpu, most in room.items():
        here = [size for need, size in zip(needs, sizes, strict=True) if gpu in need.gpus]
        spare[gpu] = (most - sum(here)) // len(here) if here else 0
    return [
        (size + min(spare[gpu] for gpu in need.gpus)) // _MIB * _MIB if index in clients else 0
        for index, (need, size) in enumerate(zip(needs, sizes, strict=True))
    ]
