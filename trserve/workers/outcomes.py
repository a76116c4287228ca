"""What becomes of a step's rows once their tokens are sampled and the router has decided.

Whoever commits a token checks it for the end, and a discarded EOS ends nothing. Two hops in a row
never both commit nothing. Knows requests, tokens and destinations; nothing of models, inputs or
rings.
"""

from __future__ import annotations

from collections.abc import Sequence

from trserve.ipc.baton import Finish
from trserve.ipc.tally import TallyWriter
from trserve.workers.annotating import mark_alone
from trserve.workers.request import Request
from trserve.workers.routing import Routing
from trserve.workers.table import RequestTable


class Outcomes:
    """Commits, hands off and ends the requests of ``table``.

    Attributes:
        lost: the models that will not come back, or cannot be reached: nobody is sent there.
    """

    def __init__(self, table: RequestTable, routing: Routing, tally: TallyWriter) -> None:
        self._table = table
        self._routing = routing
        self._peers = routing.router.peers
        self._tally = tally
        self._gone = 0  # rows of the step that neither stayed nor ended in order
        self.lost: frozenset[int] = frozenset()

    def apply(
        self,
        requests: Sequence[Request],
        tokens: Sequence[int],
        destinations: Sequence[int | None],
    ) -> None:
        """Do with each request, which sampled a token, what its destination says.

        ``destinations``: 0 stays, k goes to the k-th peer; None: the router failed.
        """
        commit, stay = self._table.commit, self._table.stay
        self._gone = 0
        for request, token, destination in zip(requests, tokens, destinations, strict=True):
            if (
                (destination == 0 or request.pinned)
                and token >= 0
                and token not in request.stop_ids
                and request.length + 1 < request.limit
            ):
                commit(request)
                stay(request)
            elif destination and token >= 0 and not request.pinned:
                self._leave(request, token, destination)
            else:
                self._apply(request, token, destination)
        if stayed := len(requests) - self._gone:
            self._tally.stayed(stayed, stayed)

    def _apply(self, request: Request, token: int, destination: int | None) -> None:
        """Of any row; what most rows of most steps need is done by :meth:`apply`."""
        if token < 0:
            self._fail(request, Finish.NUMERIC_ERROR)
        elif request.pinned or destination == 0:
            self._commit_and_stay(request, token)
        else:
            self._fail(request, Finish.ROUTER_ERROR)

    def _fail(self, request: Request, reason: Finish) -> None:
        self._gone += 1
        self._table.finish(request, reason)

    def _commit_and_stay(self, request: Request, token: int) -> None:
        self._table.commit(request)
        reason = request.end_after(token)
        if reason is None:
            self._table.stay(request)
        else:
            self._table.finish(request, reason)

    def _leave(self, request: Request, token: int, destination: int) -> None:
        model = self._peers[destination - 1]
        if self.lost and model in self.lost:
            mark_alone(request)
            self._commit_and_stay(request, token)
            return
        leaving = self._routing.send(request, token)
        if leaving is None:
            self._fail(request, Finish.ROUTER_ERROR)
            return
        keeps, extras = leaving
        empty = not keeps and request.length == request.arrival_length
        if empty and request.arrived_empty:
            # Two hops in a row that commit nothing could go on for ever.
            self._commit_and_stay(request, token)
            return
        if keeps:
            self._table.commit(request)
            reason = request.end_after(token)
            if reason is not None:
                self._table.finish(request, reason)
                return
        self._gone += 1
        self._tally.left(model, int(keeps))
        self._table.hand_off(request, model, empty=empty, router_extras=extras)
