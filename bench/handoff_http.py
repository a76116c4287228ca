"""One token per HTTP call: what a router pays that talks to an engine through its endpoint.

A client keeps one connection to a server on the loopback interface, and every call carries one
token as JSON. The server (uvicorn) does nothing but read it, so that this is the floor.
"""

from __future__ import annotations

import http.client
import json
import multiprocessing
import socket
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

Message = dict[str, Any]


class _App:
    """An ASGI application that notes how old each call's token is when it can use it."""

    def __init__(self, calls: int, results: Connection) -> None:
        self._waited = np.zeros(calls, np.int64)
        self._seen = 0
        self._results = results

    async def __call__(
        self,
        scope: Message,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        body = json.loads((await receive())["body"])
        self._waited[self._seen] = time.monotonic_ns() - int(body["started_ns"])
        self._seen += 1
        headers = [(b"content-length", b"2"), (b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"{}"})
        if self._seen == len(self._waited):
            self._results.send(self._waited)


def _serve(listener: socket.socket, calls: int, results: Connection) -> None:
    import uvicorn

    app = _App(calls, results)
    config = uvicorn.Config(
        app, lifespan="off", interface="asgi3", access_log=False, log_level="error"
    )
    uvicorn.Server(config).run(sockets=[listener])


def measure_http(warm_up: int, calls: int) -> NDArray[np.int64]:
    """Nanoseconds from the begin of a call to its token at the server, for ``calls`` calls."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        arguments = (listener, warm_up + calls, theirs)
        server = context.Process(target=_serve, args=arguments, daemon=True)
        server.start()
    theirs.close()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.connect()
    assert connection.sock is not None
    connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for token in range(warm_up + calls):
        message = {"request_id": "cmpl-4f1c0e5d", "token": token, "started_ns": 0}
        message["started_ns"] = time.monotonic_ns()
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/tokens", json.dumps(message), headers)
        connection.getresponse().read()
    waited: NDArray[np.int64] = ours.recv()
    connection.close()
    server.terminate()
    server.join()
    return waited[warm_up:]
