"""An answer, from what the words of its slot say at the far host. Stores and sends nothing."""

from __future__ import annotations

import time

import numpy as np

from trserve.edge.cloud import STAYS, Answer
from trserve.edge.port_session import Session
from trserve.edge.records import read_records
from trserve.gateway.slots import Slot
from trserve.ipc.baton import Baton, Finish, SlotState
from trserve.ipc.extras import read_extras
from trserve.ipc.slab import Slab


def answer_of(slab: Slab, session: Session, slot: Slot, baton: Baton, *, back: bool) -> Answer:
    """What is new in the row of ``session``, whose word is ``baton``.

    ``back``: the visit is over, and another model goes on.
    """
    index, start = slot.index, session.told
    prompt_len = session.contact.prompt_len
    over = baton.state is SlotState.DONE
    extras, empty = b"", False
    if back or over:
        found = read_extras(slab.extras(index, baton.bank))
        extras, empty = found.router.rstrip(b"\0"), found.empty
    scores = session.params.scores_prompt and not session.hop and start == prompt_len
    rows = range(0 if scores else start, baton.length)
    return Answer(
        session.key[1],
        session.hop,
        start,
        slab.tokens[index, start : baton.length].copy(),
        slab.source[index, start : baton.length].copy(),
        destination=baton.owner if back else STAYS,
        finish=baton.finish if over else Finish.NONE,
        extras=extras if back else b"",
        empty=empty,
        cached=slab.cached[index],
        remote_ns=time.monotonic_ns() - session.began_ns,
        left=tuple(words[index] for words in slab.left) if back else (),
        records=read_records(slab, index, session.params, prompt_len, rows),
    )


def refusal(session: int, hop: int, length: int) -> Answer:
    """That a visit is over, and its request with it, because it cannot be served here."""
    ids, sources = np.zeros(0, np.int32), np.zeros(0, np.uint8)
    return Answer(session, hop, length, ids, sources, finish=Finish.WORKER_LOST)
