"""What a link agent asks of whatever stands at the far side. Knows no slab, no sockets, no policy.

A **cloud** takes visits (a request comes to the model there), and says what was written in answers.
It has no authority: whoever receives an answer checks hop, start and every token before anything is
committed, so an answer that is lost, doubled, late or made up changes nothing. Nothing waits in a
cloud for long, and nothing is queued: what could not be sent is sent when it can be, from the row.
"""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from trserve.edge.facts import RemoteFacts
from trserve.ipc.baton import Finish
from trserve.params import RequestParams

STAYS: Final = 255
"""The destination of an answer whose visit goes on."""


class Visit(NamedTuple):
    """A request that comes to the model at the far side, or (early) may come.

    Attributes:
        session: the request; never used twice by one home server.
        hop: of the baton word that brought it; 0 for one that begins there.
        row: int32, read-only: every committed token. A view that stays valid until the session
            is ended; its committed part never changes.
        prompt_len, limit: of the row, in tokens.
        params: what the request asks for.
        left: by model: the row's length when it last gave the request away.
        extras: the router's own bytes, without the zeros at their end.
        empty: whether the hop that brought it had committed nothing, and nothing was since.
        deadline_ns: when its time is over (``time.monotonic_ns``); 0 for never.
    """

    session: int
    hop: int
    row: NDArray[np.int32]
    prompt_len: int
    limit: int
    params: RequestParams
    left: tuple[int, ...] = ()
    extras: bytes = b""
    empty: bool = False
    deadline_ns: int = 0


class Records(NamedTuple):
    """Annotations of rows: int32 [n, words], as ``ipc/annotations.py`` lays one out."""

    first: int
    words: NDArray[np.int32]


class Answer(NamedTuple):
    """What was written at the far side, so far or to the visit's end.

    Attributes:
        hop: of the visit that is answered.
        start: the row's length before ``ids``.
        ids: int32, the tokens; ``sources`` uint8, the index of the model that wrote each.
        destination: the model that goes on, or :data:`STAYS`.
        finish: why the request is over; NONE while it is not.
        extras, empty: as a visit's, for who goes on.
        cached: prompt tokens that were in the prefix cache there; -1 where nobody knows.
        remote_ns: how long the visit has been there.
        left: as a visit's; empty where it is as before.
        records: annotations of rows, where they were asked for.
        unreadable: why nothing but ``session`` and ``hop`` could be read of it; empty if all was.
    """

    session: int
    hop: int
    start: int
    ids: NDArray[np.int32]
    sources: NDArray[np.uint8]
    destination: int = STAYS
    finish: Finish = Finish.NONE
    extras: bytes = b""
    empty: bool = False
    cached: int = -1
    remote_ns: int = 0
    left: tuple[int, ...] = ()
    records: Records | None = None
    unreadable: str = ""


class Cloud(Protocol):
    """The far side of a link agent. Every call returns at once.

    Attributes:
        fd: readable when :meth:`poll` has something to do.
        connected: whether visits are taken.
        reason: why not, for people; says where.
        refused: whether it is a refusal, which trying again does not change.
        connections: grows whenever it becomes connected; every visit under way must then be given
            again.
    """

    @property
    def fd(self) -> int: ...
    @property
    def connected(self) -> bool: ...
    @property
    def reason(self) -> str: ...
    @property
    def refused(self) -> bool: ...
    @property
    def connections(self) -> int: ...

    def start(self, now: float) -> None:
        """Begin to reach it; ``now`` is ``time.monotonic()``, as everywhere."""

    def visit(self, visit: Visit) -> None:
        """A request comes. Of a session's visits the last counts."""

    def prefill(self, visit: Visit) -> None:
        """A request may come: its prompt may be computed meanwhile. May be ignored."""

    def forget(self, session: int) -> None:
        """What the far side has of the session may be wrong: the next visit brings all of it."""

    def end(self, session: int) -> None:
        """The session is over: nothing of it is kept there."""

    def poll(self, now: float) -> list[Answer]:
        """Take in what has come, do what is due; the answers, oldest first."""

    def due_s(self, now: float) -> float:
        """Seconds until :meth:`poll` has something to do although nothing comes."""

    def facts(self) -> RemoteFacts | None:
        """What it has said of its model."""

    def configure(self, values: dict[str, float]) -> None:
        """Other values of the home's router, for sessions that begin from now on."""

    def close(self) -> None:
        """Let go of everything."""
