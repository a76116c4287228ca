"""The baseline as a server: ``POST /v1/completions`` in front of the dispatcher.

It starts a server a model and answers whole completions of token-id prompts, greedily; each
request has a connection of its own to each server. No text, no streams, no sampling: it exists to
be measured by any client that can send token ids. Knows no windows.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from contextlib import ExitStack
from typing import Any, Final

import msgspec
import orjson
import uvicorn

from bench.endpoint import COMPLETIONS, Address
from bench.std_dispatch import ModelClient, Row, Tally, write
from bench.systems import Setup, single_servers

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
MAX_BODY_BYTES: Final = 4 * 2**20


class Completion(msgspec.Struct):
    """What a request may say; any other member is ignored."""

    prompt: list[int]
    max_tokens: int = 16
    ignore_eos: bool = False
    seed: int = 0


class BadRequest(Exception):
    """What is wrong with a request."""


class StandardApp:
    """The ASGI application."""

    def __init__(self, setup: Setup, servers: Sequence[Address]) -> None:
        self._setup = setup
        self._servers = servers

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request: 200, or 400 or 404 with what is wrong."""
        if scope["type"] != "http":
            return
        if (scope["method"], scope["path"]) != ("POST", COMPLETIONS):
            await _answer(send, 404, {"error": {"message": f"only POST {COMPLETIONS} is here"}})
            return
        try:
            asked = read_request(await _body(receive))
        except BadRequest as error:
            await _answer(send, 400, {"error": {"message": str(error)}})
            return
        await _answer(send, 200, await self._complete(asked))

    async def _complete(self, asked: Completion) -> dict[str, Any]:
        policy = self._setup.algorithm.policy(asked.seed, self._setup.vocabulary)
        connections = [await server.connect() for server in self._servers]
        tally = Tally(len(connections))
        try:
            clients = [
                ModelClient(each, asked.seed, policy.tops, ignore_eos=asked.ignore_eos)
                for each in connections
            ]
            output = await write(Row(asked.prompt), clients, policy, asked.max_tokens, tally)
        finally:
            for connection in connections:
                connection.close()
        return self._result(asked, output, tally)

    def _result(self, asked: Completion, output: Sequence[int], tally: Tally) -> dict[str, Any]:
        reason = "length" if len(output) == asked.max_tokens else "stop"
        written = dict(zip(self._setup.models, tally.tokens, strict=True))
        return {
            "object": "text_completion",
            "choices": [{"index": 0, "token_ids": output, "finish_reason": reason}],
            "usage": {
                "prompt_tokens": len(asked.prompt),
                "completion_tokens": len(output),
                "trserve": {"tokens": written, "handoffs": tally.handoffs},
            },
        }


def read_request(body: bytes) -> Completion:
    """The request in ``body``. Raises BadRequest."""
    try:
        asked = msgspec.json.decode(body, type=Completion)
    except msgspec.DecodeError as error:
        raise BadRequest(f"{error}; prompts are token ids here") from None
    if not asked.prompt:
        raise BadRequest("prompt is empty; send token ids")
    if asked.max_tokens < 1:
        raise BadRequest("max_tokens must be 1 or more")
    return asked


async def _body(receive: Receive) -> bytes:
    parts = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise BadRequest("the client left before its request was complete")
        part: bytes = message.get("body", b"")
        parts += part
        if len(parts) > MAX_BODY_BYTES:
            raise BadRequest(f"the body has more than {MAX_BODY_BYTES} bytes")
        if not message.get("more_body", False):
            return parts


async def _answer(send: Send, status: int, body: dict[str, Any]) -> None:
    data = orjson.dumps(body)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(data))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data})


def serve(setup: Setup, port: int) -> None:
    """Start the models' servers and answer on ``port`` until SIGINT or SIGTERM."""
    # While they start nobody else listens to it, and they would stay behind.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with ExitStack() as stack:
        servers = single_servers(stack, setup, [()] * len(setup.models))
        print(f"standard serving on http://127.0.0.1:{port}{COMPLETIONS}", file=sys.stderr)
        config = uvicorn.Config(
            StandardApp(setup, servers), port=port, log_level="warning", lifespan="off"
        )
        asyncio.run(uvicorn.Server(config).serve())
