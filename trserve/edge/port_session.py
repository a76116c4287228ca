"""What an edge port knows of one request of another host. Does nothing with it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from trserve.edge.frames import Contact, Handoff
from trserve.gateway.slots import Slot
from trserve.params import RequestParams

Key = tuple[bytes, int]
"""Who dialled, and its number for the request."""


@dataclass(slots=True)
class Session:
    """One request of another host.

    Attributes:
        model: the one here that it visits.
        hop: of the last visit, as its home counts.
        told: how much of the row its home knows.
        away: whether a visit is under way, or its answer was not sent yet.
        seen: the baton word that was answered last.
        pending: the visit that waits for a slot, with the whole row.
        began_ns: when the visit came.
        used_s: when its home last said something of it.
    """

    key: Key
    model: int
    contact: Contact
    params: RequestParams
    slot: Slot | None = None
    hop: int = -1
    told: int = 0
    away: bool = False
    seen: int = -1
    pending: Handoff | None = None
    began_ns: int = field(default_factory=time.monotonic_ns)
    used_s: float = 0.0
