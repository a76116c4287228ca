"""Extras banks: what a hop says arrives whole, in the bank that it was written to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ipc.memory import memory
from trserve.ipc.extras import Extras, read_extras, write_extras

EXTRAS = st.builds(
    Extras,
    stored_ns=st.integers(0, 2**63 - 1),
    pending_ns=st.integers(0, 3 * 3600 * 10**9),
    empty=st.booleans(),
    length=st.integers(0, 2**28 - 1),
    router=st.binary(max_size=64),
    alone=st.booleans(),
)


@given(EXTRAS)
def test_what_is_written_is_read(extras: Extras) -> None:
    bank = memoryview(bytearray(80))
    write_extras(bank, *extras)
    found = read_extras(bank)
    assert found.router == extras.router.ljust(64, b"\0")
    assert found.pending_ns // 1000 == extras.pending_ns // 1000
    assert (found.stored_ns, found.empty, found.length, found.alone) == (
        extras.stored_ns,
        extras.empty,
        extras.length,
        extras.alone,
    )


def test_a_pending_time_past_its_bits_is_the_longest_there_is() -> None:
    bank = memoryview(bytearray(80))
    write_extras(bank, 0, 10**18, True, 77)
    assert read_extras(bank).length == 77
    assert read_extras(bank).empty
    assert read_extras(bank).pending_ns > 4 * 3600 * 10**9
    assert not read_extras(bank).alone


def test_more_router_bytes_than_fit_are_refused() -> None:
    bank = memoryview(bytearray(80))
    with pytest.raises(ValueError, match="64"):
        write_extras(bank, 0, 0, False, 1, b"x" * 65)
    assert bytes(bank) == bytes(80)


def test_banks_and_slots_are_apart() -> None:
    with memory(slots=2) as shared:
        slab = shared.slab()
        for slot in range(2):
            for bank in range(2):
                write_extras(slab.extras(slot, bank), slot, bank, False, 10, b"%d" % slot)
        for slot in range(2):
            for bank in range(2):
                found = read_extras(slab.extras(slot, bank))
                assert (found.stored_ns, found.router[:1]) == (slot, b"%d" % slot)
