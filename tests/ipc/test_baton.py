"""The baton word: every field keeps its value beside any others, and fits a signed 64-bit word."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trserve.ipc.baton import Baton, Finish, SlotState, pack, unpack

LIMITS = {"length": 2**28, "owner": 2**6, "state": 8, "finish": 8, "bank": 2, "hop": 2**22}
BATONS = st.builds(
    Baton,
    length=st.integers(0, LIMITS["length"] - 1),
    owner=st.integers(0, LIMITS["owner"] - 1),
    state=st.sampled_from(SlotState),
    finish=st.sampled_from(Finish),
    bank=st.integers(0, 1),
    hop=st.integers(0, LIMITS["hop"] - 1),
)


@given(BATONS)
def test_what_is_packed_is_unpacked(baton: Baton) -> None:
    word = baton.pack()
    assert 0 <= word < 2**63
    assert unpack(word) == baton


def test_layout_is_that_of_the_protocol() -> None:
    """length:28 | owner:6 | state:3 | finish:3 | bank:1 | hop:22, most significant first."""
    parts = [(5, 28), (3, 6), (2, 3), (1, 3), (1, 1), (9, 22)]
    word = 0
    for value, bits in parts:
        word = word << bits | value
    assert pack(5, 3, 2, 1, 1, 9) == word


@given(BATONS, BATONS)
def test_a_longer_row_is_a_larger_word(one: Baton, other: Baton) -> None:
    if one.length < other.length:
        assert one.pack() < other.pack()


@pytest.mark.parametrize("field", list(LIMITS))
@pytest.mark.parametrize("below", [True, False])
def test_a_field_that_does_not_fit_is_refused(field: str, below: bool) -> None:
    fields = dict.fromkeys(LIMITS, 0) | {field: -1 if below else LIMITS[field]}
    with pytest.raises(ValueError, match=field):
        pack(**fields)


def test_states_that_a_slot_does_not_have_are_refused() -> None:
    with pytest.raises(ValueError):
        unpack(pack(0, 0, 7, 0, 0, 0))
