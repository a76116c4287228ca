"""Many short requests over a few connections: whole, streamed, and some whose client leaves.

A small HTTP/1.1 client on asyncio streams: it keeps connections open, checks that every answer
is complete, and costs less than the server that it drives. Knows no processes and no memory.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

CONNECTIONS: Final = 32
ANSWER_TIMEOUT_S: Final = 60.0
LEAVE_SHARE: Final = 0.02
STREAM_SHARE: Final = 0.5
_SHORT: Final = 6
_LONG: Final = 150
_LARGEST_ANSWER: Final = 2**20


class Request(NamedTuple):
    """One request: its ``kind`` (whole, stream or leave) and its bytes."""

    kind: str
    data: bytes


def make_request(number: int, seed: int, vocab: int) -> Request:
    """The ``number``-th request of a run: prompts of many lengths, some of which begin alike."""
    dice = random.Random(f"{seed} {number}")
    leaves, streams = dice.random() < LEAVE_SHARE, dice.random() < STREAM_SHARE
    body: dict[str, Any] = {
        "model": "trserve",
        "max_tokens": _LONG if leaves else dice.randint(1, _SHORT),
        "ignore_eos": True,
        "seed": number,
        "stream": streams,
    } | _extras(dice)
    if dice.random() < 0.2:
        content = " ".join(str(dice.randrange(1000)) for _ in range(dice.randint(1, 8)))
        path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": content}]
    else:
        own = [dice.randrange(vocab) for _ in range(dice.randint(1, 20))]
        shared = list(range(dice.choice((0, 0, 16, 40))))
        path, body["prompt"] = "/v1/completions", shared + own
    return Request("leave" if leaves else "stream" if streams else "whole", encode(path, body))


def _extras(dice: random.Random) -> dict[str, Any]:
    """What some requests ask for besides."""
    chosen = dice.random()
    if chosen < 0.1:
        return {"n": 2}
    if chosen < 0.2:
        return {"temperature": 0.7, "top_p": 0.9, "presence_penalty": 0.5}
    if chosen < 0.3:
        return {"temperature": 0, "stop": ["never in an answer"]}
    return {}


def encode(path: str, body: dict[str, Any]) -> bytes:
    """The bytes of a POST."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: soak\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


class Load:
    """Sends the requests that ``make`` makes of ``numbers``, each once a connection is free."""

    def __init__(
        self, host: str, port: int, make: Callable[[int], Request], numbers: Iterable[int]
    ) -> None:
        self._address = host, port
        self._make = make
        self._numbers = iter(numbers)

    async def run(self) -> None:
        """Return when all requests are over and all connections are closed.

        Raises:
            RuntimeError: an answer was not what it should be.
            TimeoutError: no answer came in time.
        """
        async with asyncio.TaskGroup() as group:
            for _ in range(CONNECTIONS):
                group.create_task(self._connection())

    async def _connection(self) -> None:
        client = None
        for number in self._numbers:
            request = self._make(number)
            client = client or await Client.connect(*self._address)
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                if request.kind == "leave":
                    await client.leave(request.data)
                    client = None
                else:
                    await client.exchange(request)
        if client is not None:
            await client.close()


class Client:
    """One connection, kept open."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls, host: str, port: int) -> Client:
        """A new connection."""
        return cls(*await asyncio.open_connection(host, port, limit=_LARGEST_ANSWER))

    def send(self, data: bytes) -> None:
        """Send a request."""
        self._writer.write(data)

    async def answer(self) -> tuple[bytes, bytes]:
        """Head and body of the answer to what was sent, read to the end."""
        head = await self._reader.readuntil(b"\r\n\r\n")
        if b"transfer-encoding: chunked" in head:
            return head, await self._reader.readuntil(b"\r\n0\r\n\r\n")
        return head, await self._reader.readexactly(_content_length(head))

    async def events(self, count: int) -> int:
        """Read the head of a stream and its first events, or all there are; its status."""
        head = await self._reader.readuntil(b"\r\n\r\n")
        status = int(head.split(b" ", 2)[1])
        for _ in range(count if status == 200 else 0):
            if b"[DONE]" in await self._reader.readuntil(b"\n\n"):
                break
        return status

    async def exchange(self, request: Request) -> None:
        """Send a request and read its answer to the end."""
        self.send(request.data)
        head, body = await self.answer()
        complete = b'"finish_reason":"length"' in body
        ended = request.kind == "whole" or b"data: [DONE]" in body
        if not (head.startswith(b"HTTP/1.1 200 ") and complete and ended):
            raise RuntimeError(f"a wrong answer to {request.data!r}: {(head + body)!r}")

    async def leave(self, data: bytes) -> None:
        """Send a request and close the connection once it is under way, or at once."""
        self.send(data)
        if b'"stream": true' in data:
            await self.events(0)
        await self.close()

    async def close(self) -> None:
        """Close the connection."""
        self._writer.close()
        await self._writer.wait_closed()


def _content_length(head: bytes) -> int:
    _, found, rest = head.partition(b"content-length: ")
    if not found:
        raise RuntimeError(f"an answer without a length: {head!r}")
    return int(rest.partition(b"\r\n")[0])
