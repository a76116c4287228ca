"""Memory shared out between weights and KV, and between models."""

from hypothesis import given
from hypothesis import strategies as st

from trserve.kv_capacity import RESERVE_SHARE, common_capacity, kv_budget

SIZES = st.lists(st.integers(1, 2**30), min_size=1, max_size=4)


@given(memory=st.integers(0, 2**36), weights=SIZES, most=st.integers(0, 2**36))
def test_weights_and_reserve_are_left_alone(memory, weights, most):
    budget = kv_budget(memory, weights, most)
    assert 0 <= budget <= most
    if budget:
        assert budget + sum(weights) + memory // RESERVE_SHARE <= memory
    if budget < most:
        assert budget == max(0, memory - sum(weights) - memory // RESERVE_SHARE)


@given(budget=st.integers(0, 2**36), per_token=SIZES)
def test_the_capacity_is_the_largest_that_all_can_have(budget, per_token):
    capacity = common_capacity(budget, per_token)
    assert capacity * sum(per_token) <= budget < (capacity + 1) * sum(per_token)


def test_models_without_layers_hold_whatever_is_asked():
    assert common_capacity(10, [0, 0]) is None
