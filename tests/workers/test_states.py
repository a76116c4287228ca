"""The state table of a request inside a worker: every pair of state and event."""

from __future__ import annotations

import itertools

import pytest

from trserve.workers.states import Event, State, advance

W, R, P, F = State.WAITING, State.RUNNING, State.PENDING, State.FINISHED
LEGAL = {
    (W, Event.SCHEDULED): R,
    (W, Event.HANDED_OFF): P,
    (W, Event.FINISHED): F,
    (R, Event.SCHEDULED): R,
    (R, Event.HANDED_OFF): P,
    (R, Event.KV_LOST): W,
    (R, Event.FINISHED): F,
    (P, Event.CAME_BACK): R,
    (P, Event.CAME_BACK_EMPTY): W,
    (P, Event.KV_LOST): P,
    (P, Event.FINISHED): F,
}


@pytest.mark.parametrize(("state", "event"), list(itertools.product(State, Event)))
def test_every_pair_is_a_move_or_raises(state: State, event: Event) -> None:
    if (state, event) in LEGAL:
        assert advance(state, event) is LEGAL[state, event]
    else:
        with pytest.raises(ValueError, match=f"{state.name}.*{event.name}"):
            advance(state, event)
