"""The end of a step gone through before its time: nobody can tell that it was."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.workers.fakes import (
    EarlyRouter,
    FakeRouter,
    SubmittingHashRunner,
    World,
    hash_route,
    router_class,
    world,
)
from trserve.ipc.baton import BANK_SHIFT, LENGTH_SHIFT
from trserve.workers.rehearsal import MOST_ROWS, rehearse
from trserve.workers.request import Request

IN_THE_SLAB = ("_row", "banks")
PROMPTS = [[11, 12, 13, 14, 15, number] for number in range(4)]


def everything(w: World, request: Request) -> list[Any]:
    """What anybody may rely on of a request: its words, its row, its active bank, its object."""
    slab, slot = w.slab, request.slot
    word = slab.baton[slot]
    length = max(word >> LENGTH_SHIFT, request.length)
    values = [getattr(request, name) for name in Request.__slots__ if name not in IN_THE_SLAB]
    return [
        word,
        slab.tokens[slot, :length].tolist(),
        slab.source[slot, :length].tolist(),
        bytes(slab.extras(slot, word >> BANK_SHIFT & 1)),
        [slab.left[model][slot] for model in range(slab.layout.workers)],
        slab.sent[slot],
        [v.tolist() if isinstance(v, np.ndarray) else v for v in values],
    ]


@pytest.mark.parametrize("base", [FakeRouter, EarlyRouter])
@pytest.mark.parametrize("share", [5, 60])
def test_it_changes_nothing_that_anybody_relies_on(
    base: type[FakeRouter], share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rehearsed = 0
    with world(
        router=router_class(hash_route(1, share), base=base), runner=SubmittingHashRunner
    ) as w:
        for worker in w.workers:
            inner, table = worker.runner.on_waking, worker.table

            def on_waking(inner: Any = inner, table: Any = table) -> None:
                nonlocal rehearsed
                before = [everything(w, request) for request in table.resident.values()]
                inner()
                assert [everything(w, r) for r in table.resident.values()] == before
                rehearsed += 1

            monkeypatch.setattr(worker.runner, "on_waking", on_waking)
        slots = [w.submit(prompt, limit=50, ignore_eos=True) for prompt in PROMPTS]
        w.run(*slots)
    assert rehearsed > 100


class Counted:
    """A request of which it is counted how often its word is asked for."""

    stop_ids: frozenset[int] = frozenset()
    length, limit = 5, 9
    asked = 0

    @property
    def word(self) -> int:
        Counted.asked += 1
        return 1


def test_it_takes_no_longer_for_more_rows_than_there_is_time_for() -> None:
    written: list[int] = []
    rows: Any = SimpleNamespace(
        requests=[Counted()] * 300, places=np.arange(300), destinations=None
    )
    writer: Any = SimpleNamespace(write=lambda places, tokens: written.append(len(places)))
    rehearse(rows, writer)
    assert Counted.asked == MOST_ROWS and written == [300]
