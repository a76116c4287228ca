"""One request to one group, and its answer back as it is.

A group that cannot be reached has answered nothing, and the caller may ask another; an answer that
breaks off in the middle ends with an error that says so, as its other tokens are with the group.
Knows nothing of which group it should be, of who may ask and of what a request means.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

import aiohttp
from yarl import URL

from trserve.cluster.groups import Group
from trserve.errors import RequestError
from trserve.gateway.access import ADMIN_PATHS
from trserve.gateway.replies import Scope, Send
from trserve.gateway.responses import error_body
from trserve.gateway.sinks import COMMENT

log = logging.getLogger(__name__)
_HOP_BY_HOP: Final = frozenset(
    {b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer", b"upgrade", b"host"}
    | {b"content-length", b"proxy-authorization", b"expect"}
)
_EVENTS: Final = b"text/event-stream"
_EVENT_END: Final = b"\n\n"
_COMMENT: Final = b"%x\r\n%b\r\n" % (len(COMMENT), COMMENT)
_OUR_LIBRARYS: Final = ("accept", "accept-encoding", "content-type", "user-agent")
"""Headers that it would add where the client sent none."""
ANSWER_S: Final = 30.0
"""How long a group may take for what concerns the server, not the models."""

_Headers = list[tuple[bytes, bytes]]


class Courier:
    """Speaks to groups.

    Args:
        key: what the groups ask of whoever speaks to them, in the place of the client's own; None
            where the client's key is theirs to check.
        lose: told of a group that does not answer, and why.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        key: str | None,
        lose: Callable[[Group, str], None],
    ) -> None:
        self._session = session
        self._key = key
        self._lose = lose

    async def exchange(self, group: Group, scope: Scope, body: bytes | None, send: Send) -> bool:
        """Pass the request on and the answer back; False if the group did not begin to answer."""
        begun, events, last = False, False, _EVENT_END
        connection = scope["state"]["connection"]

        def comment() -> None:
            if begun and events and last == _EVENT_END:
                connection.write(_COMMENT)

        connection.on_silence = comment
        try:
            async with self._request(group, scope, body) as reply:
                headers = _answer_headers(reply, group)
                events = any(name == b"content-type" and _EVENTS in v for name, v in headers)
                start = {"type": "http.response.start", "status": reply.status, "headers": headers}
                if scope["http_version"] == "1.0" and reply.content_length is None:
                    await _send_whole(send, start, await reply.read())  # it knows no chunks
                    return True
                begun = True
                await send(start)
                async for piece in reply.content.iter_any():
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                    last = (last + piece)[-len(_EVENT_END) :]
            await send({"type": "http.response.body", "body": b""})
        except (aiohttp.ClientError, TimeoutError) as error:
            self._lose(group, repr(error))
            if not begun:
                return False
            cut = b"" if last == _EVENT_END else _EVENT_END  # what was cut off is an event too
            await _break_off(send, group, cut, events=events)
        finally:
            connection.on_silence = None
        return True

    def _request(self, group: Group, scope: Scope, body: bytes | None) -> Any:
        target = scope["raw_path"] + b"?" * bool(scope["query_string"]) + scope["query_string"]
        return self._session.request(
            scope["method"],
            URL(group.url + target.decode("ascii"), encoded=True),
            data=body or None,
            headers=self.request_headers(scope),
            skip_auto_headers=_OUR_LIBRARYS,
            allow_redirects=False,
        )

    def request_headers(self, scope: Scope) -> list[tuple[str, str]]:
        """What a group gets of the client's headers, and the key that it asks for."""
        # Who administers has a key of their own, which the groups check as well.
        ours = self._key is not None and scope["path"] not in ADMIN_PATHS
        kept = [
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in scope["headers"]
            if name not in _HOP_BY_HOP and not (ours and name == b"authorization")
        ]
        if ours:
            kept.append(("authorization", f"Bearer {self._key}"))
        return kept

    async def ask(self, group: Group, scope: Scope, body: bytes | None) -> tuple[int, bytes]:
        """Status and body of its answer; 503 where it does not answer in time."""
        try:
            async with asyncio.timeout(ANSWER_S), self._request(group, scope, body) as reply:
                return reply.status, await reply.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            self._lose(group, repr(error))
            what = RequestError(f"group {group.index} is away: {error!r}", status=503)
            return what.status, error_body(what)


def _answer_headers(reply: aiohttp.ClientResponse, group: Group) -> _Headers:
    kept = [(k.lower(), v) for k, v in reply.raw_headers if k.lower() not in _HOP_BY_HOP]
    if (length := reply.headers.get("content-length")) is not None:
        kept.append((b"content-length", length.encode()))
    return [*kept, (b"x-trserve-group", str(group.index).encode())]


async def _send_whole(send: Send, start: dict[str, Any], body: bytes) -> None:
    headers = [*start["headers"], (b"content-length", b"%d" % len(body))]
    await send({**start, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _break_off(send: Send, group: Group, cut: bytes, *, events: bool) -> None:
    """End an answer that its group did not: with an error in a stream, else with the connection.

    ``cut`` ends what is left of an event.
    """
    log.error("group %d went away in the middle of an answer", group.index)
    if not events:
        raise ConnectionAbortedError(f"group {group.index} went away in the middle of an answer")
    error = RequestError(
        f"group {group.index} went away in the middle of this answer; ask again", status=503
    )
    frame = cut + b"data: " + error_body(error) + _EVENT_END
    await send({"type": "http.response.body", "body": frame, "more_body": True})
    await send({"type": "http.response.body", "body": b""})
