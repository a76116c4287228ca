"""Joint KV memory: no GPU ever holds more than it has, and no block more would fit."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from trserve.gpus.memory import (
    Need,
    activation_bytes,
    attention_bytes,
    common_tokens,
    fits,
    process_limits,
    rank_weight_bytes,
    used,
)
from trserve.models.aliases import alias_spec

GIB, MIB = 2**30, 2**20
BLOCK = 16


@st.composite
def systems(draw: st.DrawFn) -> tuple[list[Need], dict[int, int]]:
    """A few models over a few GPUs, of sizes at which anything may happen."""
    count = draw(st.integers(1, 4))
    room = {gpu: draw(st.integers(0, 4000)) * MIB for gpu in range(count)}
    group = st.sets(st.integers(0, count - 1), min_size=1).map(lambda g: tuple(sorted(g)))
    needs = [
        Need(
            name=f"model {index}",
            gpus=draw(group),
            weights=draw(st.integers(0, 2000)) * MIB,
            fixed=draw(st.integers(0, 200)) * MIB,
            per_token=draw(st.integers(1, 400_000)),
            most_tokens=draw(st.integers(1, 4000)) * BLOCK,
        )
        for index in range(draw(st.integers(1, 4)))
    ]
    return needs, room


def by_hand(needs: Sequence[Need], tokens: int, gpu: int) -> int:
    return sum(
        n.weights + n.fixed + min(tokens, n.most_tokens) * n.per_token
        for n in needs
        if gpu in n.gpus
    )


@settings(max_examples=100, deadline=None)
@given(systems(), st.integers(0, 8000))
def test_no_gpu_holds_more_than_it_has_and_no_block_more_would_fit(system, kv_mib):
    needs, room = system
    kv_most = kv_mib * MIB
    tokens = common_tokens(needs, room, BLOCK, kv_most)
    if tokens is None:
        assert any(by_hand(needs, 0, gpu) > most for gpu, most in room.items())
        return
    assert tokens % BLOCK == 0
    all_kv = sum(min(tokens, n.most_tokens) * n.per_token * len(n.gpus) for n in needs)
    assert not kv_most or all_kv <= kv_most
    assert all(by_hand(needs, tokens, gpu) <= most for gpu, most in room.items())
    if tokens < max(n.most_tokens for n in needs):
        assert not fits(needs, room, tokens + BLOCK, kv_most)


@settings(max_examples=50, deadline=None)
@given(systems())
def test_limits_of_processes_hold_what_they_need_and_never_exceed_a_gpu_together(system):
    needs, room = system
    tokens = common_tokens(needs, room, BLOCK)
    if tokens is None:
        return
    each = [min(tokens, n.most_tokens) for n in needs]
    limits = process_limits(needs, each, room, set(range(len(needs))))
    for gpu, most in room.items():
        assert sum(limit for n, limit in zip(needs, limits, strict=True) if gpu in n.gpus) <= most
    for need, count, limit in zip(needs, each, limits, strict=True):
        assert limit % MIB == 0
        assert limit > need.size(count) - MIB


def test_only_clients_are_limited():
    need = Need("a", (0,), GIB, 0, 1000, 1600)
    assert process_limits([need, need], [1600, 1600], {0: 8 * GIB}, {1})[0] == 0


def test_two_models_on_one_gpu_share_what_is_left():
    """8 GiB, 3 for weights: 5 GiB at 2 + 6 KiB a token."""
    needs = [Need("a", (0,), GIB, 0, 2048, 10**9), Need("b", (0,), 2 * GIB, 0, 6144, 10**9)]
    assert common_tokens(needs, {0: 8 * GIB}, BLOCK) == 5 * GIB // 8192 // BLOCK * BLOCK
    assert used(needs, 0, 0) == 3 * GIB


def test_weights_of_ranks_cover_the_model_once_but_for_what_is_whole_everywhere():
    spec = alias_spec("32b")
    whole, half = rank_weight_bytes(spec, 2, 1), rank_weight_bytes(spec, 2, 2)
    embeddings = 2 * 2 * spec.vocab_size * spec.hidden_size
    assert whole == 2 * spec.num_parameters
    assert half - embeddings == (whole - embeddings) // 2


def test_a_step_takes_megabytes_and_not_gigabytes():
    size = activation_bytes(alias_spec("32b"), 2, 1, tokens=2048, rows=64)
    assert 100 * MIB < size < GIB


def test_attention_of_a_large_model_is_planned_with_what_a_large_gpu_takes():
    """More than 132 multiprocessors take (383 MiB), and half as much in each of two processes."""
    one, two = (attention_bytes(alias_spec("32b"), tp, tokens=2048, rows=64) for tp in (1, 2))
    assert 383 * MIB <= one - 8 * MIB < 512 * MIB
    assert one - 8 * MIB <= 2 * (two - 8 * MIB) + MIB
    assert attention_bytes(alias_spec("0.6b"), 1, tokens=2048, rows=64) == 136 * MIB
    # More processes than KV heads is refused elsewhere, and is a number here.
    assert attention_bytes(alias_spec("0.6b"), 64, tokens=2048, rows=64) > 0
