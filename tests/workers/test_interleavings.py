"""Every interleaving of two processes that pass a request on, with a crash after every prefix.

Whatever the schedule, what is committed is a prefix of the right row, nothing is taken back, and
when everybody sleeps all requests have all of it and are closed. The belt of a sleep is left out:
bells alone must suffice. The mutations at the end are what the rules of the protocol are for; each
of them is found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.ipc.interleaving import Explorer, Memory, Violation, Words
from tests.ipc.memory import memory
from tests.workers import simulated
from tests.workers.simulated import (
    BLOB,
    GATEWAY,
    HALF,
    ROW,
    TAIL,
    WORKERS,
    gateway,
    right_row,
    worker,
)
from trserve.gateway import slots as slots_module
from trserve.gateway.slots import SlotTable
from trserve.ipc import publish
from trserve.ipc.baton import WITHOUT_LENGTH, Finish, SlotState, pack, unpack
from trserve.ipc.extras import write_extras
from trserve.ipc.layout import EPOCH_WORD, EXTRAS_BYTES
from trserve.ipc.slab import Slab
from trserve.workers import table as table_module
from trserve.workers.table import RequestTable


def check_rows(rows: dict[int, list[int]]) -> Callable[[Memory], None]:
    """No token is lost, doubled, taken back or another request's; ``rows`` are right, by gen."""

    def check(memory: Memory) -> None:
        baton, gen = unpack(memory.get(("baton", 0), 0)), memory.get(("gen", 0), 0)
        if baton.state not in (SlotState.LIVE, SlotState.DONE):
            return
        row = [memory.get(("tokens", at), 0) for at in range(baton.length)]
        if row != rows[gen][: len(row)]:
            raise Violation(f"{baton}: {row} is no beginning of {rows[gen]}")
        if len(row) < memory.get(("seen", gen), 0):
            raise Violation(f"{baton}: a token was taken back")
        memory["seen", gen] = len(row)

    return check


def reaped(memory: Memory) -> None:
    """A worker has ended: the launcher bumps the epoch and rings everybody."""
    epoch = ("header", EPOCH_WORD)
    memory[epoch] = memory.get(epoch, 0) + 1
    for index in range(WORKERS + 1):
        memory["bell", index] = 1


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slab]:
    """A slab of one slot with parameters and lengths; clocks that stand, bells in the memory."""
    for module in (table_module, slots_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic_ns=lambda: 1))
    monkeypatch.setattr(publish, "ring", lambda bell: bell[0].store(bell[1], 1))
    with memory(slots=1, row_tokens=ROW, workers=WORKERS) as shared:
        slab = shared.slab()
        slab.write_params(0, BLOB)
        yield slab


def exchange(real: Slab, limit: int, **options: Any) -> Explorer:
    """Two workers hand one request back and forth, from worker 0 on."""
    prompt = [7, 8]
    real.prompt_len[0], real.limit[0] = len(prompt), limit
    start: Memory = {("tokens", at): value for at, value in enumerate(prompt)}
    bank = bytearray(EXTRAS_BYTES)
    write_extras(memoryview(bank), 1, 0, empty=False, length=len(prompt))
    start |= {
        ("gen", 0): 1,
        ("sent", 0): 1,
        ("baton", 0): pack(len(prompt), 0, SlotState.LIVE, Finish.NONE, 0, 0),
        ("extras", 0, 0, 0): bytes(bank[:HALF]),
        ("extras", 0, 0, 1): bytes(bank[HALF:]),
    }
    expected = right_row(prompt, limit, 0)

    def check_end(memory: Memory) -> None:
        baton = unpack(memory["baton", 0])
        if (baton.state, baton.length) != (SlotState.DONE, limit):
            raise Violation(f"everybody sleeps and the request is lost: {baton}")
        if any(memory.get((("closed", w), 0), 0) != 1 for w in range(WORKERS)):
            raise Violation("everybody sleeps and somebody holds a request that is over")

    programs = [worker(real, index, [1 - index]) for index in range(WORKERS)]
    return Explorer(
        programs, start, check_rows({1: expected}), check_end, on_crash=reaped, **options
    )


def is_about_slots(key: Any) -> bool:
    """Words that say whose a slot is, and what others are told of it; rows and banks are not."""
    what, at = key if isinstance(key, tuple) and len(key) == 2 else (key, 0)
    if isinstance(what, tuple):
        return what[0] == "closed" or at == TAIL
    return what in ("baton", "gen", "sent", "bell")


def reuse(real: Slab, limit: int, **options: Any) -> Explorer:
    """The gateway puts two requests into the only slot, one after the other."""
    prompts = [[7, 8], [9, 10]]
    real.prompt_len[0], real.limit[0] = 2, limit
    rows = {gen: right_row(prompt, limit, 0) for gen, prompt in enumerate(prompts, 1)}

    def check_end(memory: Memory) -> None:
        if memory.get("answered", 0) != len(prompts):
            raise Violation("everybody sleeps and a request is lost")

    programs = [worker(real, index, [1 - index, GATEWAY]) for index in range(WORKERS)]
    programs.append(gateway(real, prompts, limit))
    return Explorer(
        programs,
        {},
        check_rows(rows),
        check_end,
        on_crash=reaped,
        visible=is_about_slots,
        **options,
    )


def test_an_exchange_in_every_order(real: Slab, full: bool) -> None:
    explorer = exchange(real, limit=6 if full else 5)
    explorer.run()
    assert explorer.states > 2_000 and explorer.ends > 0


@pytest.mark.parametrize("victim", range(WORKERS))
def test_a_crash_after_every_prefix(real: Slab, victim: int) -> None:
    """One of two workers is interrupted anywhere, the other one where it sleeps."""
    others = frozenset({1 - victim})
    explorer = exchange(real, limit=6, whole_turns=others, victims=[victim], crashes=1)
    explorer.run()
    assert explorer.states > 1_000 and explorer.ends > 1


@pytest.mark.slow
@pytest.mark.parametrize("victim", range(WORKERS))
def test_a_crash_after_every_prefix_of_every_order(real: Slab, victim: int) -> None:
    explorer = exchange(real, limit=4, victims=[victim], crashes=1)
    explorer.run()
    assert explorer.states > 5_000 and explorer.ends > 1


@pytest.mark.parametrize("other", range(WORKERS))
def test_a_slot_is_used_again_in_every_order(real: Slab, other: int) -> None:
    """The gateway and one worker in every order, with turns of the other one in between."""
    explorer = reuse(real, limit=3, whole_turns=frozenset({other}))
    explorer.run()
    assert explorer.ends > 1


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_slot_is_used_again_after_a_crash(real: Slab, victim: int) -> None:
    """Of a worker that is interrupted anywhere; the others are where they sleep."""
    others = frozenset({GATEWAY, 1 - victim})
    explorer = reuse(real, limit=3, whole_turns=others, victims=[victim], crashes=1)
    explorer.run()
    assert explorer.states > 300 and explorer.ends > 1


def split(length_first: bool) -> type[Words]:
    """Words whose stores of a baton are two: the length, and all else."""

    class Split(Words):
        def __setitem__(self, at: Any, value: Any) -> None:
            if self.name == "baton":
                before = self.process.load((self.name, at), private=True)
                first, then = (value, before) if length_first else (before, value)
                between = first & ~WITHOUT_LENGTH | then & WITHOUT_LENGTH
                self.process.store((self.name, at), between)
            super().__setitem__(at, value)

    return Split


@pytest.mark.parametrize("length_first", [True, False])
def test_a_baton_in_two_words_is_found(
    real: Slab, monkeypatch: pytest.MonkeyPatch, length_first: bool
) -> None:
    monkeypatch.setattr(simulated, "Words", split(length_first))
    with pytest.raises(Violation):
        exchange(real, limit=5, whole_turns=frozenset({0}), victims=[1], crashes=1).run()


def rescan_by_presence(table: RequestTable) -> None:
    """Looks at no slot whose request is in the table already."""
    slab = table._slab
    table._epoch = slab.header[EPOCH_WORD]
    if 0 not in table.resident:
        table.sync(0, slab.gen[0])


def test_a_rescan_by_presence_is_found(real: Slab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RequestTable, "rescan", rescan_by_presence)
    turns = frozenset({1})
    exchange(real, limit=5, whole_turns=turns).run()  # without a crash, rings bring everything
    with pytest.raises(Violation, match="lost"):
        exchange(real, limit=5, whole_turns=turns, victims=[0], crashes=1).run()


def test_a_slot_that_is_used_again_too_early_is_found(
    real: Slab, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_done(table: SlotTable, index: int, gen: int) -> bool:
        return unpack(table._slab.baton[index]).state is SlotState.DONE

    monkeypatch.setattr(SlotTable, "_is_closed", is_done)
    with pytest.raises(Violation):
        reuse(real, limit=3, whole_turns=frozenset({1})).run()
