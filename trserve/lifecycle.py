"""The states of a server and of its children, and every legal move. Pure; knows no process.

Everything that affects the launcher's state machine is in this table; an illegal move raises.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final


class ServerState(Enum):
    """Where a server stands."""

    STARTING = auto()  # children load; clients wait in the listening socket's backlog
    SERVING = auto()
    DRAINING = auto()  # no new requests; open streams finish
    STOPPING = auto()  # children are told to end
    STOPPED = auto()


class ServerEvent(Enum):
    """What happens to a server."""

    ALL_READY = auto()
    STOP_ASKED = auto()  # the first SIGTERM or Ctrl-C
    DRAINED = auto()  # nothing is open any more, or the drain limit is over
    CHILD_LOST = auto()
    CHILDREN_GONE = auto()


TRANSITIONS: Final[dict[tuple[ServerState, ServerEvent], ServerState]] = {
    (ServerState.STARTING, ServerEvent.ALL_READY): ServerState.SERVING,
    (ServerState.STARTING, ServerEvent.STOP_ASKED): ServerState.STOPPING,
    (ServerState.STARTING, ServerEvent.CHILD_LOST): ServerState.STOPPING,
    (ServerState.SERVING, ServerEvent.STOP_ASKED): ServerState.DRAINING,
    (ServerState.SERVING, ServerEvent.CHILD_LOST): ServerState.DRAINING,
    (ServerState.DRAINING, ServerEvent.CHILD_LOST): ServerState.DRAINING,
    (ServerState.DRAINING, ServerEvent.DRAINED): ServerState.STOPPING,
    (ServerState.STOPPING, ServerEvent.CHILDREN_GONE): ServerState.STOPPED,
}


def advance(state: ServerState, event: ServerEvent) -> ServerState:
    """The state after ``event``. Raises ValueError for a move that the table lacks."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise ValueError(f"server in state {state.name} cannot take event {event.name}") from None
