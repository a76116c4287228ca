"""Comments in a stream that is silent, so that nothing between here and the client gives it up.

The first one opens the response; what fails from then on is told in the stream. Knows no tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType

from trserve.gateway.sinks import StreamSink


class KeepAlive:
    """A context in which ``sink`` is never silent for ``period_s``; 0 lets it be.

    Args:
        open: begins the response, if it has not begun.
    """

    def __init__(
        self, sink: StreamSink, period_s: float, open: Callable[[], Awaitable[None]]
    ) -> None:
        self._sink = sink
        self._every_s = period_s / 2  # what was written just after a look is seen at the next
        self._open = open
        self._seen = sink.num_writes
        self._task: asyncio.Task[None] | None = None

    def __enter__(self) -> KeepAlive:
        if self._every_s:
            self._task = asyncio.get_running_loop().create_task(self._watch())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._task is not None:
            self._task.cancel()

    @property
    def _has_failed(self) -> bool:
        """Whether the response is about to begin with the status of an error."""
        begun = self._sink.begun
        return begun.done() and (begun.cancelled() or begun.exception() is not None)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            if self._sink.ended.done() or self._has_failed:
                return
            if self._sink.num_writes == self._seen and not self._sink.writer.paused:
                await self._open()
                self._sink.comment()
            self._seen = self._sink.num_writes
