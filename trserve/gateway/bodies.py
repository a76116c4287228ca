"""How much the bodies of all connections take at once, while they are read and made into requests.

Knows nothing of what a body says, and not what becomes of it.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from trserve.errors import RequestError
from trserve.gateway.replies import SHORT_BODY, Receive, read_body, too_large
from trserve.gateway.visit import Visit

AT_ONCE: Final = 32
"""So many of the longest bodies."""


class Bodies:
    """One for an endpoint.

    What is counted is what has come, not what is announced: clients that send slowly take nothing
    from others that they do not fill. Bodies that came in one piece of :data:`~.replies.SHORT_BODY`
    bytes are not counted; a connection may hold as much at any time.

    Attributes:
        held: bytes that are counted now.

    Args:
        most: bytes of one body.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._total = AT_ONCE * most
        self.held = 0

    def check(self, announced: int) -> None:
        """Whether a body of so many bytes may come now. Raises RequestError (413, 429)."""
        if announced > self._most:
            raise too_large(self._most)
        if announced > SHORT_BODY:
            self._check_room(announced)

    async def read(self, visit: Visit, receive: Receive) -> bytes:
        """The whole body of a request, which counts until ``visit.let_go_of_body()``.

        Raises RequestError if it is too long, there are too many, or the client leaves within it.
        """

        def grow(size: int) -> None:
            self._check_room(size)
            visit.held_bytes += size
            self.held += size

        visit.let_go_of_body = partial(self._let_go, visit)
        return await read_body(receive, self._most, grow)

    def _let_go(self, visit: Visit) -> None:
        self.held -= visit.held_bytes
        visit.held_bytes = 0

    def _check_room(self, size: int) -> None:
        if self.held + size > self._total:
            raise RequestError(
                f"the server reads {self.held} bytes of long requests already, and no more than "
                f"{self._total} ({AT_ONCE} times --max-body-bytes) at once: ask again later",
                status=429,
                code="too_many_bodies",
                retry_after=1,
            )
