"""The states of a request inside one worker, and every legal move between them.

Everything that affects this state machine is here; a move that the table lacks raises. The slab's
own states (FREE, FILLING, LIVE, DONE) are another machine, in ``ipc/baton.py``.

A PENDING request is being written elsewhere: the scheduler skips it and its KV stays, unless
memory runs short. Losing KV never changes the row, only how much of it must be computed again.
"""

from __future__ import annotations

from enum import IntEnum, auto
from typing import Final


class State(IntEnum):  # its hash is a number's: a table's look-up takes half the time
    """Where a request stands in this worker."""

    WAITING = auto()  # ours to write; at most a cached prefix of its row is at hand
    RUNNING = auto()  # ours to write; KV valid up to num_computed
    PENDING = auto()  # another worker holds the baton
    FINISHED = auto()  # over; blocks are free


class Event(IntEnum):
    """What happens to a request."""

    SCHEDULED = auto()
    HANDED_OFF = auto()
    CAME_BACK = auto()
    CAME_BACK_EMPTY = auto()  # came back after its KV was lost
    KV_LOST = auto()
    FINISHED = auto()


TRANSITIONS: Final[dict[tuple[State, Event], State]] = {
    (State.WAITING, Event.SCHEDULED): State.RUNNING,
    (State.WAITING, Event.HANDED_OFF): State.PENDING,  # by the router's admit
    (State.WAITING, Event.FINISHED): State.FINISHED,
    (State.RUNNING, Event.SCHEDULED): State.RUNNING,
    (State.RUNNING, Event.HANDED_OFF): State.PENDING,
    (State.RUNNING, Event.KV_LOST): State.WAITING,
    (State.RUNNING, Event.FINISHED): State.FINISHED,
    (State.PENDING, Event.CAME_BACK): State.RUNNING,
    (State.PENDING, Event.CAME_BACK_EMPTY): State.WAITING,
    (State.PENDING, Event.KV_LOST): State.PENDING,
    (State.PENDING, Event.FINISHED): State.FINISHED,
}


def advance(state: State, event: Event) -> State:
    """The state after ``event``. Raises ValueError for a move that the table lacks."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise ValueError(f"request in state {state.name} cannot take event {event.name}") from None
