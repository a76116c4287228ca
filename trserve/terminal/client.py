"""HTTP to a running server, with the standard library: JSON and streams of events.

Knows no screen and no meaning of what it fetches. Every wait has a bound.
"""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final
from urllib.parse import urlsplit

import orjson

from trserve.errors import ConfigError, TrserveError

CONNECT_S: Final = 5.0
_DATA: Final = b"data:"
_DONE: Final = b"[DONE]"
_SHOWN: Final = 500
"""Bytes of an answer that is no JSON which a message repeats."""


class ServerError(TrserveError):
    """A server that cannot be reached, or refuses; the message says which and what to do."""


class Client:
    """One server.

    Args:
        url: ``http://HOST:PORT``, with or without a path before ``/v1``.
        key: sent as a bearer token; None for none.

    Raises:
        ConfigError: ``url`` is none.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        try:
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        if parts.scheme not in ("http", "https") or not host:
            raise ConfigError(f"--url {url}: write http://HOST:PORT")
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._secure = parts.scheme == "https"
        self._host, self._port = host, port
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def get(self, path: str) -> Any:
        """The JSON at ``path``. Raises ServerError."""
        with self._exchange("GET", path, None, CONNECT_S) as response:
            return _decoded(response.read())

    def events(
        self, method: str, path: str, body: Mapping[str, Any] | None, silence_s: float
    ) -> Generator[Any, None, None]:
        """The events of a stream up to its end, at most ``silence_s`` apart.

        Closing the iterator leaves the server. Raises ServerError, for an error event too.
        """
        with self._exchange(method, path, body, silence_s) as response:
            while line := response.readline():
                if not line.startswith(_DATA):
                    continue
                data = line[len(_DATA) :].strip()
                if data == _DONE:
                    return
                event = _decoded(data)
                if "error" in event:
                    raise ServerError(event["error"]["message"])
                yield event

    @contextmanager
    def _exchange(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float
    ) -> Iterator[http.client.HTTPResponse]:
        connection = self._connection()
        try:
            connection.connect()
            connection.sock.settimeout(timeout_s)
            headers = {**self._headers, "Content-Type": "application/json"}
            raw = None if body is None else orjson.dumps(body)
            connection.request(method, self._path + path, raw, headers)
            with connection.getresponse() as response:
                if response.status != http.client.OK:
                    raise ServerError(_refusal(response))
                yield response
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"{self.url}: {_reason(error)}; see --url") from None
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        if self._secure:
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(
                self._host, self._port, timeout=CONNECT_S, context=context
            )
        return http.client.HTTPConnection(self._host, self._port, timeout=CONNECT_S)


def _refusal(response: http.client.HTTPResponse) -> str:
    raw = response.read()
    try:
        message = str(orjson.loads(raw)["error"]["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        message = raw[:_SHOWN].decode(errors="replace")
    hint = "; give --api-key" if response.status == http.client.UNAUTHORIZED else ""
    return f"{response.status}: {message}{hint}"


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _decoded(raw: bytes) -> Any:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        shown = raw[:_SHOWN].decode(errors="replace")
        raise ServerError(f"the answer is no JSON: {shown!r}; is this a trserve?") from None
