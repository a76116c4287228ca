"""The front desk: what happens to every request before its route is looked at, and after.

Labels, keys, origins, the log and how long bodies may be. Knows no route.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final

from trserve.endpoint_plan import EndpointPlan
from trserve.gateway.access import Access
from trserve.gateway.bodies import Bodies
from trserve.gateway.cors import Cors, Header
from trserve.gateway.journal import Journal
from trserve.gateway.replies import Receive, Scope, Send
from trserve.gateway.visit import Visit

_WANTED_HEADERS: Final = b"access-control-request-headers"
_DEFAULTS: Final = EndpointPlan(log_requests=False)


class Desk:
    """One for an endpoint.

    Attributes:
        bodies: those that are read.

    Args:
        plan: its keys, limits, origins and log.
        labels: headers of every response, beside the request's id.
        spans: is told of every request that is over, or None.
    """

    def __init__(
        self,
        plan: EndpointPlan = _DEFAULTS,
        labels: Sequence[Header] = (),
        journal: Journal | None = None,
        spans: Callable[[Visit], None] | None = None,
    ) -> None:
        self._spans = spans
        self._access = Access(plan)
        self.bodies = Bodies(plan.max_body_bytes)
        self._cors = Cors(plan.allowed_origins)
        self._labels = labels
        self._journal = journal or Journal(
            wanted=plan.log_requests, as_json=plan.log_format == "json"
        )

    def open(self, scope: Scope, send: Send) -> tuple[Visit, Send]:
        """A request begins: its visit, and ``send`` with the labels on its response."""
        visit = Visit(scope)
        scope["state"]["connection"].visit = visit
        return visit, visit.sender(send, [*self._labels, *self._cors.headers(visit.origin)])

    def check(self, visit: Visit) -> None:
        """Whether it may ask that. Raises RequestError (401, 403, 413, 429)."""
        scope = visit.scope
        if scope["method"] != "OPTIONS":  # a browser sends no key with it
            visit.account = self._access.check(
                scope["path"], scope["query_string"], visit.authorizations
            )
        self.bodies.check(visit.body_bytes)

    async def preflight(
        self, methods: Collection[str], scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Answer OPTIONS to a path that takes ``methods``."""
        allowed = ", ".join((*methods, "OPTIONS")).encode()
        wanted = [value for name, value in scope["headers"] if name == _WANTED_HEADERS]
        headers = [
            (b"allow", allowed),
            *self._cors.preflight(allowed, wanted[0] if wanted else None),
        ]
        await send({"type": "http.response.start", "status": 204, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    def close(self, visit: Visit) -> None:
        """The request is over."""
        visit.let_go_of_body()
        self._journal.close(visit)
        if self._spans is not None:
            self._spans(visit)
        visit.requests = ()  # a connection that waits for its next request keeps the last visit
