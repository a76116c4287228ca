"""Requests whose baton just came: what is made ready for them, and what the router is asked.

Knows the table and the router; nothing of steps. A router's code may end the process here as well
as in a step, so whom it is asked about is listed as a step's requests are.
"""

from __future__ import annotations

from collections.abc import Callable

from trserve.ipc.annotations import AnnotationBook
from trserve.ipc.baton import Finish
from trserve.ipc.slab import Reach, Slab, WorkerStatus
from trserve.workers.grammar import Grammars
from trserve.workers.request import Request
from trserve.workers.routing import Routing
from trserve.workers.suspects import StepGuard
from trserve.workers.table import RequestTable


class Arrivals:
    """Takes in what comes to worker ``index``.

    Attributes:
        annotated: by slot, the requests with a book, until somebody takes out those that are over
            or another one comes in the slot.
        on_detour: called before a grammar is compiled or a router asked, which may take long.
    """

    def __init__(
        self,
        index: int,
        slab: Slab,
        table: RequestTable,
        routing: Routing,
        guard: StepGuard,
        grammars: Grammars | None = None,
    ) -> None:
        self._index = index
        self._slab = slab
        self._table = table
        self._routing = routing
        self._guard = guard
        self._grammars = grammars
        self.annotated: dict[int, Request] = {}
        self.on_detour: Callable[[], None] = _nothing_more
        table.on_arrival = self.take_in

    def take_in(self, request: Request) -> None:
        """Take in a request: the router's ``receive`` and ``admit``."""
        if request.params.annotated and request.book is None:
            first = request.params.first_record(request.prompt_len)
            request.book = AnnotationBook(
                self._slab, request.slot, first=first, tops=request.params.tops or 0
            )
            self.annotated[request.slot] = request
        if request.params.grammar and request.constraint is None:
            self.on_detour()
            self._guard.enter((request.slot,))
            assert self._grammars is not None
            request.constraint = self._grammars.constraint(request.params, request.prompt_len)
            self._guard.leave()
        if self._routing.asks_on_arrival:
            self.on_detour()
            self._guard.enter((request.slot,))
            self._ask(request)
            self._guard.leave()

    def _ask(self, request: Request) -> None:
        if not self._routing.receive(request):
            self._table.finish(request, Finish.ROUTER_ERROR)
        elif self._routing.asks_admit and request.is_new and request.params.admit:
            self._admit(request)

    def _admit(self, request: Request) -> None:
        model = self._routing.admit(request)
        if model is None:
            self._table.finish(request, Finish.ROUTER_ERROR)
        elif model != self._index and model not in self.lost_models():
            self._table.hand_off(request, model, empty=False)

    def lost_models(self) -> frozenset[int]:
        """The models that will not come back, or cannot be reached now."""
        return frozenset(
            worker
            for worker, words in enumerate(self._slab.workers)
            if words.get("status") == WorkerStatus.LOST or words.get("reach") == Reach.ALONE
        )


def _nothing_more() -> None:
    """Nothing else is to be done before."""
