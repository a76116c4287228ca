"""HTTP calls whose answers are waited for in threads, over connections that are kept.

``http.client`` blocks, and a link agent must not: a call is handed to a thread, and its outcome to
whoever polls a descriptor. Every wait is bounded: a call has its time as a whole, from when a
thread begins it, however slowly an answer trickles in. It is sent a second time only where a
connection that had been idle turns out to be closed, which says nothing of the server. Knows HTTP;
nothing of visits or of what is asked.
"""

from __future__ import annotations

import http.client
import math
import os
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from email.utils import parsedate_to_datetime
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from trserve.errors import ConfigError

MAX_CONNECTIONS: Final = 32
CONNECT_S: Final = 5.0
MAX_BODY: Final = 16 * 2**20
_LOOK_S: Final = 0.25
_LONGEST_PAUSE_S: Final = 86_400.0
_TOO_LATE: Final = "no answer came in time"
_STALE: Final = (
    http.client.RemoteDisconnected,
    BrokenPipeError,
    ConnectionResetError,
    ConnectionAbortedError,
    ssl.SSLEOFError,
    ssl.SSLZeroReturnError,
)


class Outcome(NamedTuple):
    """What became of call ``number``.

    Attributes:
        status: of HTTP; 0 where no answer came, for the reason ``error``.
        body: of the answer.
        retry_after_s: the pause that the server asks for; None where it asks for none.
    """

    number: int
    status: int = 0
    body: bytes = b""
    error: str = ""
    retry_after_s: float | None = None


class Server:
    """Where calls go: the parts of an ``http://`` or ``https://`` URL; a final ``/v1`` is left out.

    Raises ConfigError for anything else.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"openai:{url}: write openai:http://HOST:PORT/v1")
        try:
            self.port = parts.port
        except ValueError as error:
            raise ConfigError(f"openai:{url}: {error}") from None
        self.host = parts.hostname
        self.prefix = parts.path.rstrip("/").removesuffix("/v1")
        self.url = f"{parts.scheme}://{parts.netloc}{self.prefix}"
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None

    def connection(self) -> http.client.HTTPConnection:
        """A connection that is not made yet."""
        if self._tls is None:
            return http.client.HTTPConnection(self.host, self.port, timeout=CONNECT_S)
        return http.client.HTTPSConnection(
            self.host, self.port, timeout=CONNECT_S, context=self._tls
        )


class Calls:
    """Calls to one server. All methods are one thread's.

    Args:
        headers: sent with each call.
    """

    def __init__(self, server: Server, headers: Mapping[str, str]) -> None:
        self._server = server
        self._headers = dict(headers)
        self._pool = ThreadPoolExecutor(MAX_CONNECTIONS, thread_name_prefix="openai")
        # The one used last is taken first: it is the least likely to have been closed meanwhile.
        self._idle: deque[http.client.HTTPConnection] = deque()
        self._outcomes: deque[Outcome] = deque()
        self._lock = threading.Lock()
        self._sockets: dict[int, socket.socket] = {}
        self._open: set[int] = set()
        self._deadlines: dict[int, float] = {}
        self._numbers = 0
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable when :meth:`outcomes` has some."""

    def begin(
        self, path: str, body: bytes | None, timeout_s: float, until: float = math.inf
    ) -> int:
        """Begin a call, a GET where there is no ``body``; returns its number.

        Args:
            timeout_s: how long it may take once a thread is free for it.
            until: when it has to be over at the latest, ``time.monotonic()``.
        """
        self._numbers += 1
        number = self._numbers
        with self._lock:
            self._open.add(number)
        self._pool.submit(self._run, number, path, body, timeout_s, until)
        return number

    def cancel(self, number: int) -> None:
        """Want nothing more of a call; the server sees its connection go."""
        with self._lock:
            self._open.discard(number)
            self._deadlines.pop(number, None)
            if (used := self._sockets.get(number)) is not None:
                with suppress(OSError):
                    used.shutdown(socket.SHUT_RDWR)

    def wake(self) -> None:
        """Make :attr:`fd` readable."""
        os.eventfd_write(self.fd, 1)

    def outcomes(self) -> list[Outcome]:
        """Those of calls that are over and were not cancelled."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        found: list[Outcome] = []
        while self._outcomes:
            outcome = self._outcomes.popleft()
            with self._lock:
                wanted = outcome.number in self._open
                self._open.discard(outcome.number)
            if wanted:
                found.append(outcome)
        return found + self._overdue()

    def _overdue(self) -> list[Outcome]:
        """Of calls whose time is over, though bytes may still come, one by one."""
        now = time.monotonic()
        with self._lock:
            numbers = [number for number, deadline in self._deadlines.items() if deadline <= now]
        for number in numbers:
            self.cancel(number)
        return [Outcome(number, error=_TOO_LATE) for number in numbers]

    def due_s(self) -> float:
        """Seconds until :meth:`outcomes` may have one although :attr:`fd` is not readable."""
        with self._lock:
            if len(self._open) > len(self._deadlines):
                return _LOOK_S  # one that waits for a thread has no deadline yet
            earliest = min(self._deadlines.values(), default=math.inf)
        return max(0.0, earliest - time.monotonic())

    def close(self) -> None:
        """Cancel everything."""
        for number in list(self._open):
            self.cancel(number)
        self._pool.shutdown(wait=True, cancel_futures=True)
        for connection in self._idle:
            connection.close()
        os.close(self.fd)

    # -- in a thread -------------------------------------------------------------------------

    def _run(
        self, number: int, path: str, body: bytes | None, timeout_s: float, until: float
    ) -> None:
        try:
            deadline = self._start(number, min(time.monotonic() + timeout_s, until))
            outcome = self._exchange(number, path, body, deadline)
        except (OSError, http.client.HTTPException, ValueError) as error:
            outcome = Outcome(number, error=explain(error))
        with self._lock:
            self._deadlines.pop(number, None)
        self._outcomes.append(outcome)
        with suppress(OSError):  # closed meanwhile
            os.eventfd_write(self.fd, 1)

    def _start(self, number: int, deadline: float) -> float:
        with self._lock:
            if number not in self._open:
                raise ValueError("cancelled")
            self._deadlines[number] = deadline
        return deadline

    def _exchange(self, number: int, path: str, body: bytes | None, deadline: float) -> Outcome:
        if (kept := self._take_idle()) is not None:
            with suppress(*_STALE):
                return self._ask(kept, number, path, body, deadline)
        return self._ask(self._server.connection(), number, path, body, deadline)

    def _take_idle(self) -> http.client.HTTPConnection | None:
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _ask(
        self,
        connection: http.client.HTTPConnection,
        number: int,
        path: str,
        body: bytes | None,
        deadline: float,
    ) -> Outcome:
        try:
            if connection.sock is None:
                connection.connect()
            self._watch(number, connection.sock, deadline)
            connection.request(
                "GET" if body is None else "POST",
                self._server.prefix + path,
                body,
                {**self._headers, **({} if body is None else {"Content-Type": "application/json"})},
            )
            with connection.getresponse() as response:
                content = response.read(MAX_BODY + 1)
                if len(content) > MAX_BODY:
                    raise ValueError("its answer is too long")
                pause_s = _pause_of(response.getheader("Retry-After"))
                outcome = Outcome(number, response.status, content, retry_after_s=pause_s)
        except BaseException:
            connection.close()
            raise
        finally:
            with self._lock:
                self._sockets.pop(number, None)
        if connection.sock is not None:
            self._idle.append(connection)
        return outcome

    def _watch(self, number: int, used: socket.socket, deadline: float) -> None:
        """Bound what is waited for, and let :meth:`cancel` end it."""
        used.settimeout(max(0.001, deadline - time.monotonic()))
        with self._lock:
            if number not in self._open:
                raise ValueError("cancelled")
            self._sockets[number] = used


def _pause_of(said: str | None) -> float | None:
    """Of a Retry-After: seconds, or a date."""
    if said is None:
        return None
    try:
        if said.strip().isdecimal():
            return min(float(said), _LONGEST_PAUSE_S)
        pause_s = parsedate_to_datetime(said).timestamp() - time.time()
    except (ValueError, OverflowError):
        return None
    return min(max(0.0, pause_s), _LONGEST_PAUSE_S)


def explain(error: Exception) -> str:
    """Why a call failed, for people."""
    if isinstance(error, TimeoutError):
        return _TOO_LATE
    if isinstance(error, ConnectionRefusedError):
        return "nobody listens there"
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
