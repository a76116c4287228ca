"""What an administrator changed on all groups, for those that were away then.

A group that comes back begins with the flags of its start; before it takes a request it is told
what has been changed since. Held in memory alone: with the endpoint's process all groups end. Knows
no requests, and of a change no more than that later values win.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final

import aiohttp
import orjson

from trserve.cluster.groups import Group

log = logging.getLogger(__name__)
PATH: Final = "/v1/trserve/routing"
TELL_S: Final = 12.0
"""How long a group may take; longer than the two questions to its own launcher may
(``ANSWER_WITHIN_S``)."""


class StandingChange:
    """All changes so far, as one.

    Attributes:
        turn: held while groups are told, so that none comes back between two of them.
    """

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._headers: list[tuple[str, str]] = []
        self._members: dict[str, Any] = {}
        self.turn = asyncio.Lock()

    def note(self, headers: list[tuple[str, str]], body: bytes) -> None:
        """A group took the change ``body``, which came with ``headers``, the key among them."""
        for name, value in orjson.loads(body).items():
            held = self._members.get(name)
            if isinstance(held, dict) and name == "router":
                value = {**held, **value}  # a name that is not in it keeps what it was set to
            self._members[name] = value
        self._headers = headers

    async def bring(self, group: Group) -> bool:
        """Tell a group that has come back; False if it is to be asked again later.

        One that refuses what the others took serves as it is: a log line says so. Whoever makes
        the group ready does so at once: after the turn a change no longer passes it over.
        """
        async with self.turn:
            if not self._members:
                return True
            try:
                status, said = await self._tell(group)
            except (aiohttp.ClientError, TimeoutError) as error:
                status, said = 503, repr(error)
        if status >= 500:
            log.warning("group %d was not told of the routing change: %s", group.index, said)
        elif status >= 400:
            log.error(
                "group %d refuses the routing change %s (%d: %s) and serves with what it was "
                "started with",
                group.index,
                self._members,
                status,
                said,
            )
        return status < 500

    async def _tell(self, group: Group) -> tuple[int, str]:
        async with self._session.post(
            group.url + PATH,
            data=orjson.dumps(self._members),
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=TELL_S),
        ) as reply:
            return reply.status, await reply.text(errors="replace")
