"""What an edge port knows of one request of another host. Does nothing with it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from trserve.edge.frames import Contact, Handoff
from trserve.edge.port_slots import Opening
from trserve.gateway.slots import Slot, pages_of
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

    def waits_with(self, length: int) -> bool:
        """Whether it waits for a slot with a row of ``length`` tokens."""
        return self.pending is not None and len(self.pending.ids) == length

    def opening(self, handoff: Handoff, row: NDArray[np.int32]) -> Opening:
        """What its slot begins as; ``row``: int32, all of its tokens with those of ``handoff``."""
        contact, params = self.contact, self.params
        return Opening(
            row=row,
            prompt_len=contact.prompt_len,
            limit=contact.limit,
            blob=contact.blob,
            pages=pages_of(params, contact.prompt_len, contact.limit),
            left=handoff.left,
            owner=self.model,
            hop=handoff.hop,
            extras=handoff.extras,
            empty=handoff.empty,
            # Whoever had it first has scored the prompt.
            scored=handoff.hop > 0,
        )
