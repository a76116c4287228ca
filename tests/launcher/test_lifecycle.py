"""The state table of a server: every pair of state and event, and that every state has an end."""

from __future__ import annotations

import itertools

import pytest

from trserve.lifecycle import ServerEvent, ServerState, advance

S, E = ServerState, ServerEvent
LEGAL = {
    (S.STARTING, E.ALL_READY): S.SERVING,
    (S.STARTING, E.STOP_ASKED): S.STOPPING,
    (S.STARTING, E.CHILD_LOST): S.STOPPING,
    (S.SERVING, E.STOP_ASKED): S.DRAINING,
    (S.SERVING, E.CHILD_LOST): S.DRAINING,
    (S.DRAINING, E.CHILD_LOST): S.DRAINING,
    (S.DRAINING, E.DRAINED): S.STOPPING,
    (S.STOPPING, E.CHILDREN_GONE): S.STOPPED,
}


@pytest.mark.parametrize(("state", "event"), list(itertools.product(S, E)))
def test_every_pair_is_a_move_or_raises(state: ServerState, event: ServerEvent) -> None:
    if (state, event) in LEGAL:
        assert advance(state, event) is LEGAL[state, event]
    else:
        with pytest.raises(ValueError, match=rf"{state.name}.*{event.name}"):
            advance(state, event)


@pytest.mark.parametrize("state", [state for state in S if state is not S.STOPPED])
def test_every_state_leads_to_the_end(state: ServerState) -> None:
    reached = {state}
    for _ in S:
        reached |= {after for (before, _), after in LEGAL.items() if before in reached}
    assert S.STOPPED in reached
