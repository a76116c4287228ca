"""Whole HTTP messages over ASGI: a body read to its end, a reply in one piece, an error.

Knows the error envelope; nothing of routes or of what is said.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

from trserve.errors import RequestError
from trserve.gateway.responses import error_body

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Handler = Callable[[Scope, Receive, Send], Awaitable[None]]

SHORT_BODY: Final = 64 * 1024
"""What uvicorn takes from any connection before somebody reads it."""

JSON: Final = (b"content-type", b"application/json")


async def read_body(
    receive: Receive, most: int, grow: Callable[[int], None] = lambda size: None
) -> bytes:
    """The whole body, of ``most`` bytes at most.

    ``grow`` is told of every part before it is kept, but for a whole body of :data:`SHORT_BODY`.

    Raises RequestError if it has more, or the client leaves within it; and what ``grow`` raises.
    """
    message = await receive()
    body: bytes = message.get("body", b"")
    if message["type"] == "http.request" and not message.get("more_body", False):
        if len(body) > most:
            raise too_large(most)
        if len(body) > SHORT_BODY:
            grow(len(body))
        return body
    parts: list[bytes] = []
    size = 0
    while True:
        if message["type"] == "http.disconnect":
            raise RequestError("the client left before its request was complete", status=400)
        part = message.get("body", b"")
        size += len(part)
        if size > most:
            raise too_large(most)
        grow(len(part))
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)
        message = await receive()


def too_large(most: int) -> RequestError:
    """What is said of a body of more than ``most`` bytes."""
    return RequestError(
        f"the body has more than {most} bytes: send less, or start the server with a larger "
        "--max-body-bytes",
        status=413,
        code="body_too_large",
    )


async def send_json(send: Send, status: int, body: bytes) -> None:
    """A reply of JSON."""
    await send_body(send, status, body, b"application/json")


async def send_body(send: Send, status: int, body: bytes, content_type: bytes) -> None:
    """A reply of any content type."""
    headers = [(b"content-type", content_type), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, error: RequestError) -> None:
    """A reply that is the error envelope."""
    body = error_body(error)
    headers = [JSON, (b"content-length", str(len(body)).encode())]
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if error.retry_after is not None:
        headers.append((b"retry-after", str(error.retry_after).encode()))
    if error.allow is not None:
        headers.append((b"allow", error.allow.encode()))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
