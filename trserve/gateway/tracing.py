"""What the gateway notes in its ring of events: the life of each request as its client sees it.

Three events a request, and none a token. Knows slots and generations; nothing of clients or HTTP.
"""

from __future__ import annotations

from typing import Final

from trserve.gateway.slots import Slot
from trserve.ipc.slab import Slab
from trserve.ipc.trace import MAX_VALUE, AnswerEnd, EventKind, TraceWriter

_ENDS: Final = {
    "stop": AnswerEnd.STOP,
    "length": AnswerEnd.LENGTH,
    "abort": AnswerEnd.ABORT,
    "error": AnswerEnd.ERROR,
    "left": AnswerEnd.CLIENT_LEFT,
}


class GatewayTrace:
    """Notes events as they happen, in the gateway's ring of ``slab``."""

    def __init__(self, slab: Slab) -> None:
        self._note = TraceWriter(slab.trace_words(slab.layout.gateway)).note

    def published(self, slot: Slot, prompt_tokens: int, when_ns: int) -> None:
        """A request has a slot, which it got at ``when_ns``: before its worker could look."""
        tokens = min(prompt_tokens, MAX_VALUE)
        self._note(EventKind.PUBLISHED, tokens, slot.index, slot.gen, when_ns)

    def first_token(self, slot: Slot) -> None:
        """The client was given the first of the answer."""
        self._note(EventKind.FIRST_TOKEN, 0, slot.index, slot.gen)

    def answered(self, slot: Slot, reason: str) -> None:
        """The answer is over, by a ``Generation``'s ``end_reason``."""
        end = _ENDS.get(reason, AnswerEnd.ERROR)  # a bug may end it without one
        self._note(EventKind.ANSWERED, end, slot.index, slot.gen)
