"""One request on one connection: it ends with whichever of the two ends first.

Knows no routes and no response formats.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from types import TracebackType

from trserve.errors import RequestError
from trserve.gateway.access import Account
from trserve.gateway.connection import Connection
from trserve.gateway.dispatcher import Dispatcher, Job
from trserve.gateway.generation import Generation
from trserve.gateway.requests import GenerationRequest
from trserve.gateway.sinks import StreamSink, WholeSink
from trserve.gateway.visit import Visit


class Exchange:
    """A context in which the task is cancelled at the moment its client is gone.

    Leaving it, however that happens, gives up the request's slots. A cancellation that came from
    the client's end stops here; any other goes on.
    """

    def __init__(self, dispatcher: Dispatcher, connection: Connection) -> None:
        self._dispatcher = dispatcher
        self._connection = connection
        self._generations: Sequence[Generation] = ()
        self._sink: WholeSink | StreamSink | None = None
        self._client_gone = False
        self._aborted = False
        self._doomed: set[int] = set()
        self._task = asyncio.current_task(connection.loop)

    def __enter__(self) -> Exchange:
        self._connection.on_lost = self._on_lost
        self._connection.on_drained = self._on_drained
        if self._connection.lost:
            self._on_lost()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self._connection.on_lost = self._connection.on_drained = self._connection.on_silence = None
        for generation in self._generations:
            if not generation.ended:
                self._dispatcher.cancel(generation)
        if self._connection.visit is not None:
            self._connection.visit.leave(self._generations)
        for generation in self._generations:
            generation.let_go()
        if self._sink is not None:
            self._sink.let_go()
        return self._client_gone and isinstance(error, asyncio.CancelledError)

    def understood(
        self, requests: Sequence[GenerationRequest], sink: WholeSink | StreamSink
    ) -> None:
        """What is asked for, and where its answers go."""
        self._sink = sink
        if isinstance(sink, StreamSink):
            self._connection.on_silence = sink.comment
        if self._connection.visit is not None:
            self._connection.visit.understood(requests, sink.response_id)

    async def submit(self, jobs: Awaitable[Sequence[Job]]) -> None:
        """Get the request into the server, once its ``jobs`` are made.

        Raises:
            RequestError: 429, it, or its key, must wait; 400, it was aborted meanwhile.
        """
        try:
            made = await jobs
            if self._connection.visit is not None:
                self._connection.visit.enter(made)
            self._generations = await self._dispatcher.submit_all(made)
            if self._doomed:
                self.abort_some(self._doomed)
        except asyncio.CancelledError:
            if self._client_gone or not self._aborted:
                raise
            raise RequestError("the request was aborted while it waited", code="aborted") from None

    @property
    def generations(self) -> Sequence[Generation]:
        """Those of the request; empty while it waits."""
        return self._generations

    @property
    def visit(self) -> Visit | None:
        """What is kept of it; None where nobody looked."""
        return self._connection.visit

    @property
    def account(self) -> Account | None:
        """Whose request it is; None where nobody looked."""
        visit = self._connection.visit
        return None if visit is None else visit.account

    def abort(self) -> None:
        """End the request: with what there is of its answers, or an error while it waits."""
        for generation in self._generations:
            self._dispatcher.abort(generation)
        if not self._generations and self._task is not None:
            self._aborted = True
            self._task.cancel()

    def abort_some(self, numbers: Iterable[int]) -> None:
        """End these of its answers, while it waits as soon as they have slots."""
        if not self._generations:
            self._doomed.update(numbers)
            return
        for number in numbers:
            self._dispatcher.abort(self._generations[number])

    def _on_lost(self) -> None:
        self._client_gone = True
        if self._task is not None:
            self._task.cancel()

    def _on_drained(self) -> None:
        for generation in self._generations:
            self._dispatcher.resume(generation)
