"""The groups behind one endpoint: where each is, whether it answers, how much it has to do.

A group is a whole trserve server with an address of its own. Its supervisor says where it is; here
it is asked now and then whether it is ready, and any failed connection says that it is not. Knows
no supervisors and no requests' content.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

import aiohttp

log = logging.getLogger(__name__)
PROBE_EVERY_S: Final = 1.0
PROBE_TIMEOUT_S: Final = 2.0


@dataclass(eq=False)
class Group:
    """One of them.

    Attributes:
        url: ``http://HOST:PORT``; empty while it is nowhere.
        ready: whether all of it serves.
        waits: whether it takes requests although it is not ready: they wait in it, as for a worker
            that is started again.
        detail: why it is not ready.
        in_flight: requests that it has to do of those that came through here.
        served: how many it has answered.
        losses: how often it went away.
    """

    index: int
    url: str = ""
    ready: bool = False
    waits: bool = False
    detail: str = "not started yet"
    in_flight: int = 0
    served: int = 0
    losses: int = 0

    @property
    def is_there(self) -> bool:
        """Whether it takes requests."""
        return self.ready or self.waits


class Groups:
    """All of them.

    Args:
        session: makes the requests.
        on_loss: called with the index of a group that went away.

    Attributes:
        on_return: asked about a group that answers again; False if it is not to serve yet.
    """

    def __init__(
        self, count: int, session: aiohttp.ClientSession, on_loss: Callable[[int], None]
    ) -> None:
        self.all: Sequence[Group] = [Group(index) for index in range(count)]
        self._session = session
        self._on_loss = on_loss
        self.on_return: Callable[[Group], Awaitable[bool]] = _at_once
        self._returning: dict[int, asyncio.Task[None]] = {}
        self.changed = asyncio.Event()

    def move(self, index: int, url: str, detail: str) -> None:
        """The supervisor says where a group is; with an empty ``url``, that it is nowhere."""
        group = self.all[index]
        if url != group.url:
            if group.url:
                self.lose(group, detail)
            group.url = url
        if not group.is_there:
            group.detail = detail

    @property
    def there(self) -> list[Group]:
        """Those that take requests."""
        return [group for group in self.all if group.is_there]

    @property
    def best(self) -> list[Group]:
        """Those that a request is for: the ready ones, else those in which it can wait."""
        return [group for group in self.all if group.ready] or self.there

    def lose(self, group: Group, detail: str) -> None:
        """It does not answer any more."""
        if group.is_there:
            group.losses += 1
            log.warning("group %d is away: %s", group.index, detail)
            self._on_loss(group.index)
        group.ready, group.waits, group.detail = False, False, detail

    async def watch(self) -> None:
        """Ask them all, until this is cancelled."""
        try:
            while True:
                await asyncio.gather(*(self._probe(group) for group in self.all if group.url))
                self.changed.set()
                await asyncio.sleep(PROBE_EVERY_S)
        finally:
            for task in self._returning.values():
                task.cancel()
            await asyncio.gather(*self._returning.values(), return_exceptions=True)

    async def _probe(self, group: Group) -> None:
        url = group.url
        try:
            timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
            async with self._session.get(f"{url}/readyz", timeout=timeout) as reply:
                body = await reply.json(content_type=None)
                ready, detail = reply.status == 200, str(body.get("detail", reply.status))
                takes = ready or (reply.status == 503 and body.get("takes_requests") is True)
        except (aiohttp.ClientError, TimeoutError, ValueError, AttributeError) as error:
            ready, takes, detail = False, False, repr(error)
        if group.url != url:
            return  # it moved meanwhile
        if not takes:
            self.lose(group, detail)
        elif group.is_there:
            self._show(group, detail, ready=ready)
        elif group.index not in self._returning:
            # By itself: one that takes long to come back keeps nobody from being asked.
            task = asyncio.create_task(self._come_back(group, url, detail, ready=ready))
            self._returning[group.index] = task
            task.add_done_callback(lambda _: self._returning.pop(group.index))

    def _show(self, group: Group, detail: str, *, ready: bool) -> None:
        """It is there, and ready or not; what it was told and what it has cached, it still has."""
        if ready and not group.ready:
            log.info("group %d is ready at %s", group.index, group.url)
        elif not ready and not group.waits:
            log.warning("requests wait in group %d: %s", group.index, detail)
        group.ready, group.waits, group.detail = ready, not ready, detail

    async def _come_back(self, group: Group, url: str, detail: str, *, ready: bool) -> None:
        try:
            serves = await self.on_return(group)
        except Exception:
            log.exception("group %d cannot be made ready", group.index)
            return
        if serves and group.url == url:
            self._show(group, detail, ready=ready)
            self.changed.set()


async def _at_once(group: Group) -> bool:
    """Whoever answers serves."""
    return True
