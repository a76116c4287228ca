"""What a worker notes in its ring of events. Knows requests by their slot, generation and hop.

What happens between the routers of two workers is only remembered, with its time, and written when
nobody waits for it any more: a handoff of many requests would else take a tenth longer. The meter,
which sums up how long they took, learns of it then as well.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Final

from trserve.ipc.baton import Finish
from trserve.ipc.trace import MAX_VALUE, EventKind, GateReason, TraceWriter
from trserve.sched.gate import Reason
from trserve.workers.metering import WorkerMeter
from trserve.workers.request import Request

# Plain integers: to build a word from an enum's member takes longer.
_STEP: Final = int(EventKind.STEP)
_SENT: Final = int(EventKind.HANDOFF_SENT)
_RECEIVED: Final = int(EventKind.HANDOFF_RECEIVED)
_RESUMED: Final = int(EventKind.RESUMED)
_GATE: Final = int(EventKind.GATE_OPENED)
_WHY: Final = {reason: int(GateReason[reason.name]) for reason in Reason}
_ADMITTED: Final = int(EventKind.ADMITTED)
_FINISHED: Final = int(EventKind.FINISHED)


class WorkerTrace:
    """Notes events as they happen.

    Args:
        meter: sums up how long they took, if anybody does.

    Attributes:
        unresumed: by slot, requests that came and were in no step yet. Some may have left again,
            as all do where no step is ever taken; so it is never more than there are slots.
    """

    def __init__(self, writer: TraceWriter, meter: WorkerMeter | None = None) -> None:
        self._note = writer.note
        self.meter = meter
        # The arguments of ``note``, and what the meter is told besides.
        self._remembered: list[tuple[int, ...]] = []
        self.unresumed: dict[int, Request] = {}

    def step(self, width: int, rows: int, began_ns: int, ended_ns: int) -> None:
        """A step of ``rows`` rows has ended; ``width``: likewise, 0 if one was a prompt's."""
        asked_ns = -1
        if self.meter is not None:
            asked_ns, self.meter.asked_ns = self.meter.asked_ns, -1
        self._remembered.append((_STEP, rows, 0, began_ns, ended_ns, width, asked_ns))

    def gate_opened(self, reason: Reason, when_ns: int) -> None:
        """A step may begin."""
        self._remembered.append((_GATE, _WHY[reason], 0, 0, when_ns))

    def arrived(self, request: Request) -> None:
        """The baton of ``request`` has come: from the gateway, or by a handoff."""
        if request.hop:
            when = request.runnable_since_ns
            self._remembered.append((_RECEIVED, request.hop, request.slot, request.gen, when))
        else:
            self._note(_ADMITTED, min(request.length, MAX_VALUE), request.slot, request.gen)
        self.unresumed[request.slot] = request

    def sent(self, request: Request, hop: int, when_ns: int, model: int) -> None:
        """``request`` leaves for ``model``, by its hop ``hop``."""
        event = (_SENT, hop, request.slot, request.gen, when_ns, model, request.length)
        self._remembered.append(event)

    def write(self) -> None:
        """Write what is only remembered; called after the results of a step are published."""
        if self._remembered:
            for event in self._remembered:
                self._note(*event[:5])
            if self.meter is not None:
                self.meter.remember(self._remembered)
            self._remembered.clear()

    def finished(self, request: Request, reason: Finish) -> None:
        """``request`` is over."""
        self._note(_FINISHED, reason, request.slot, request.gen)

    def resumed(self, requests: Iterable[Request], runnable: Container[int], began_ns: int) -> None:
        """These are in the step that began then; called once it is under way.

        ``runnable`` has the slots of those that may still come into one.
        """
        left, self.unresumed = self.unresumed, {}
        taken = {request.slot for request in requests}
        for slot, request in left.items():
            if slot in taken:
                if request.hop:
                    self._note(_RESUMED, request.hop, slot, request.gen)
                if self.meter is not None:
                    self.meter.taken(request, began_ns)
            elif slot in runnable:
                self.unresumed[slot] = request
