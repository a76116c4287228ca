"""What became of requests: the open ones by the names they go by, and the last of the others.

Answers ``GET /v1/trserve/requests/{id}`` and finds what is to be aborted. Written twice for a
request, at its beginning and its end. Knows no HTTP and no slots.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final

from trserve.errors import RequestError
from trserve.gateway.access import ADMIN, Account
from trserve.gateway.exchange import Exchange
from trserve.gateway.requests import GenerationRequest
from trserve.gateway.responses import total_usage
from trserve.gateway.sinks import StreamSink, WholeSink

MAX_KEPT: Final = 1024


class _Entry:
    """One open request."""

    def __init__(
        self,
        log: RequestLog,
        sink: WholeSink | StreamSink,
        exchange: Exchange,
        requests: Sequence[GenerationRequest],
    ) -> None:
        self._log = log
        self._requests = requests
        self._created = int(time.time())
        self.exchange = exchange
        self.response_id = sink.response_id

    @property
    def account(self) -> Account | None:
        """Whose request it is."""
        return self.exchange.account

    def __enter__(self) -> None:
        self._log.open(self)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            # An error within a stream ends it without a finish reason, or without any answer.
            told = [generation.finish_reason for generation in self.exchange.generations]
            self._log.close(self, "finished" if told and all(told) else "failed")
        else:
            self._log.close(self, "failed" if isinstance(error, RequestError) else "cancelled")

    def abort(self, rid: str | None) -> bool:
        """End the answers that go by ``rid``, all for None; False if none does."""
        # Each answer's: requests that share a response may have a name each.
        rids = [request.rid for request in self._requests for _ in range(request.num_choices)]
        named = [number for number, own in enumerate(rids) if _goes_by(own, rid)]
        if rid in (None, self.response_id) or len(named) == len(rids):
            self.exchange.abort()
        elif named:
            self.exchange.abort_some(named)
        else:
            return False
        return True

    def describe(self, status: str) -> dict[str, Any]:
        """What there is to say of it now."""
        request, generations = self._requests[0], self.exchange.generations
        usages = [generation.usage() for generation in generations]
        # Requests that share a response differ in n; then the prompt of each choice counts.
        n = request.n if len(self._requests) == 1 else 1
        return {
            "id": self.response_id,
            "object": "trserve.request",
            "model": request.model_as_sent,
            "created": self._created,
            "status": status,
            "finish_reasons": [generation.finish_reason for generation in generations],
            "usage": total_usage(usages, n) if usages else None,
        }


class RequestLog:
    """The requests of this gateway."""

    def __init__(self) -> None:
        self._open: dict[str, _Entry] = {}
        self._ended: OrderedDict[str, dict[str, Any]] = OrderedDict()

    def entry(
        self,
        sink: WholeSink | StreamSink,
        exchange: Exchange,
        requests: Sequence[GenerationRequest],
    ) -> _Entry:
        """While the context lasts the request is open; how it is left says how it ended."""
        return _Entry(self, sink, exchange, requests)

    def open(self, entry: _Entry) -> None:
        """``entry``'s request has come."""
        self._open[entry.response_id] = entry

    def close(self, entry: _Entry, status: str) -> None:
        """``entry``'s request is over."""
        del self._open[entry.response_id]
        self._keep(entry.response_id, entry.describe(status))

    def _keep(self, response_id: str, said: dict[str, Any]) -> None:
        self._ended[response_id] = said
        if len(self._ended) > MAX_KEPT:
            self._ended.popitem(last=False)

    def describe(self, response_id: str) -> dict[str, Any]:
        """What is known of a response's request. Raises RequestError (404) if nothing is."""
        if entry := self._open.get(response_id):
            return entry.describe("running")
        if said := self._ended.get(response_id):
            return said
        raise RequestError(
            f"no request {response_id!r} among the open ones and the last {MAX_KEPT}; ask with "
            "the id of its response",
            status=404,
            code="not_found",
        )

    def abort(self, rid: str | None, by: Account | None) -> int:
        """End the open requests that go by ``rid``, all of them for None; returns how many.

        ``by`` whom: the administrator reaches all, any other account its own.
        """
        reaches_all = by is not None and by.name == ADMIN
        reached = [each for each in self._open.values() if reaches_all or each.account is by]
        return sum([entry.abort(rid) for entry in reached])


def _goes_by(own: str | None, rid: str | None) -> bool:
    """Whether an answer's ``own`` name is ``rid``, or that with its number in a batch."""
    if own is None or rid is None:
        return False
    name, _, number = own.rpartition("_")
    return own == rid or (name == rid and number.isdecimal())
