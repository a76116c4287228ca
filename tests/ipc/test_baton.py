"""The baton word: every field keeps its value beside any others, and fits a signed 64-bit word."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trserve.ipc.baton import (
    OWNER_AND_STATE,
    Baton,
    Finish,
    SlotState,
    hand_over,
    live_of,
    pack,
    unpack,
)

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


@given(BATONS, st.integers(0, LIMITS["owner"] - 1))
def test_a_handed_over_word_keeps_the_row_and_flips_the_bank(baton: Baton, owner: int) -> None:
    live = baton._replace(state=SlotState.LIVE, finish=Finish.NONE)
    hop = min(live.hop + 1, LIMITS["hop"] - 1)
    expected = live._replace(owner=owner, bank=live.bank ^ 1, hop=hop)
    word = hand_over(live.pack(), owner, hop)
    assert unpack(word) == expected
    assert word & OWNER_AND_STATE == live_of(owner)
    assert (live.pack() & OWNER_AND_STATE == live_of(owner)) == (live.owner == owner)


def test_one_hop_too_many_is_refused() -> None:
    word = pack(9, 1, SlotState.LIVE, Finish.NONE, 0, LIMITS["hop"] - 1)
    with pytest.raises(ValueError, match="handed off"):
        hand_over(word, 0, LIMITS["hop"])


@given(BATONS)
def test_only_a_live_word_of_its_owner_is_live_of_it(baton: Baton) -> None:
    whose = baton.pack() & OWNER_AND_STATE
    assert (whose == live_of(baton.owner)) == (baton.state is SlotState.LIVE)
