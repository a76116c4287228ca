"""A trserve server as a subprocess, with its requests and what is left of it afterwards.

Black box: it knows the command line, the ready line and HTTP, and looks at the operating system
for processes, files and shared memory; it imports nothing of trserve. Every wait is bounded.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TypeVar
from urllib.parse import urlsplit

from tests.procfs import command, descendants, mapped_shm, marked, shm_names, start_time

READY_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0
_MARK = "TRSERVE_TEST_MARK"
"""An environment variable that a server's processes inherit, whoever their parent becomes."""
_READY = re.compile(
    r"trserve ready (?P<url>http://\S+:\d+) models=(?P<models>\S+) "
    r"router=(?P<router>\S+) device=(?P<device>\S+)"
)

T = TypeVar("T")
R = TypeVar("R")


class StartFailedError(Exception):
    """The server ended, or was not ready in time; carries its exit code (None if it hung)."""

    def __init__(self, code: int | None, stderr: str) -> None:
        super().__init__(f"no ready line (exit code {code}); standard error:\n{stderr[-4000:]}")
        self.code = code
        self.stderr = stderr


@dataclass(frozen=True)
class Response:
    """A whole HTTP response; header names are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Leftovers:
    """What of an instance still exists. Falsy when nothing does."""

    processes: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    shared_memory: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.processes or self.files or self.shared_memory)


class Server:
    """``python -m trserve launch --port 0 ...`` in its own process group and runtime directory.

    Use as a context manager; on entry it waits for the ready line, on exit it ends everything.
    ``runtime`` is the directory in which the server finds TMPDIR and XDG_RUNTIME_DIR; by default
    a fresh one of this server.
    """

    COMMAND: Sequence[str] = (sys.executable, "-m", "trserve", "launch", "--port", "0")

    def __init__(
        self,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        runtime: Path | None = None,
        ready_timeout_s: float = READY_TIMEOUT_S,
    ) -> None:
        self.args = list(args)
        self.ready_timeout_s = ready_timeout_s
        self.mark = uuid.uuid4().hex
        self.stdout: list[str] = []
        self._stderr: list[str] = []
        self._own_runtime = runtime is None
        # Directly below /tmp: the path of a socket holds 107 bytes.
        self.runtime = runtime or Path(tempfile.mkdtemp(prefix="trs-", dir="/tmp"))
        self._env = {**server_env(self.runtime), **(env or {}), _MARK: self.mark}
        self._family: set[tuple[int, str]] = set()
        self._ready = threading.Event()

    def __enter__(self) -> Server:
        self._shm_before = shm_names()
        self.process = subprocess.Popen(
            [*self.COMMAND, *self.args],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self._env,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None and self.process.stderr is not None
        self._follow(self.process.stdout, self.stdout)
        self._follow(self.process.stderr, self._stderr)
        try:
            self._wait_ready()
        except BaseException:
            self._clean_up()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._clean_up()

    @property
    def pid(self) -> int:
        """Process id of the launcher."""
        return self.process.pid

    @property
    def stderr(self) -> str:
        """What it wrote to standard error so far."""
        return "".join(self._stderr)

    def children(self) -> list[int]:
        """Process ids of all living descendants of the launcher."""
        return descendants(self.pid)

    def send_signal(self, number: int) -> None:
        """Signals the launcher alone, as a supervisor would."""
        self._remember_family()
        self.process.send_signal(number)

    def wait(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """The exit code of the launcher; subprocess.TimeoutExpired if it goes on."""
        return self.process.wait(timeout_s)

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """SIGTERM, then the exit code."""
        self.send_signal(signal.SIGTERM)
        return self.wait(timeout_s)

    def kill(self) -> None:
        """SIGKILL to the launcher alone: nobody cleans up but its children and the kernel."""
        self.send_signal(signal.SIGKILL)
        self.wait()

    def kill_all(self) -> None:
        """SIGKILL to every process of the instance at once."""
        self._remember_family()
        for pid, _ in self._living():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.wait()

    def leftovers(self) -> Leftovers:
        """Processes, files and shared memory of this instance that exist now."""
        processes = [f"{pid}: {command(pid)}" for pid, _ in self._living()]
        files = sorted(str(path) for path in self.runtime.rglob("*"))
        mine = shm_names() - self._shm_before
        return Leftovers(processes, files, sorted(mine - mapped_shm()) if mine else [])

    def wait_gone(self, timeout_s: float = 10.0) -> Leftovers:
        """Polls until nothing is left or the time is over; returns what still is."""
        return wait_until(self.leftovers, lambda left: not left, timeout_s)

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
    ) -> Response:
        """One HTTP exchange; ``body`` is bytes as they are, or anything that JSON can say."""
        with self._exchange(method, path, body, headers, timeout_s) as response:
            lower = {name.lower(): value for name, value in response.getheaders()}
            return Response(response.status, lower, response.read())

    def post(self, path: str, body: Any, timeout_s: float = 60.0) -> Any:
        """The JSON of a POST that must succeed."""
        response = self.request("POST", path, body, timeout_s=timeout_s)
        assert response.status == 200, f"{response.status}: {response.body.decode()[:2000]}"
        return response.json()

    def stream(self, path: str, body: Any, timeout_s: float = 60.0) -> Iterator[Any]:
        """The events of a stream, up to and without ``[DONE]``. Closing it early disconnects."""
        with self._exchange("POST", path, {**body, "stream": True}, None, timeout_s) as response:
            assert response.status == 200, f"{response.status}: {response.read().decode()[:2000]}"
            for line in iter(response.readline, b""):
                if line == b"data: [DONE]\n":
                    return
                if line.startswith(b"data: "):
                    yield json.loads(line[len(b"data: ") :])
            raise AssertionError("the stream ended without [DONE]")

    @contextlib.contextmanager
    def _exchange(
        self,
        method: str,
        path: str,
        body: Any,
        headers: Mapping[str, str] | None,
        timeout_s: float,
    ) -> Iterator[http.client.HTTPResponse]:
        address = urlsplit(self.url)
        connection = http.client.HTTPConnection(address.netloc, timeout=timeout_s)
        raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        try:
            sent = {"Content-Type": "application/json", **(headers or {})}
            connection.request(method, path, raw, sent)
            response = connection.getresponse()
            with response:
                yield response
        finally:
            connection.close()

    def _follow(self, pipe: IO[str], lines: list[str]) -> None:
        def read() -> None:
            for line in pipe:
                lines.append(line)
                if match := _READY.match(line):
                    self.ready_line = line
                    self.url = match["url"]
                    self.models = match["models"].split(",")
                    self.router = match["router"]
                    self.device = match["device"]
                    self._ready.set()

        threading.Thread(target=read, daemon=True).start()

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + self.ready_timeout_s
        while not self._ready.wait(0.02):
            code = self.process.poll()
            if code is not None or time.monotonic() > deadline:
                raise StartFailedError(code, self.stderr)

    def _remember_family(self) -> None:
        """Orphans have another parent, and a process may have rewritten its environment."""
        identities = ((pid, start_time(pid)) for pid in [self.pid, *self.children()])
        self._family.update((pid, start) for pid, start in identities if start is not None)

    def _living(self) -> list[tuple[int, str]]:
        family = {(pid, start) for pid, start in self._family if start_time(pid) == start}
        return sorted(family | marked(_MARK, self.mark))

    def _clean_up(self) -> None:
        if self.process.poll() is None:
            self.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.wait(10.0)
        self.kill_all()
        if self._own_runtime:
            shutil.rmtree(self.runtime, ignore_errors=True)


def server_env(runtime: Path) -> dict[str, str]:
    """The environment of a server that must find no models, caches or settings of this machine."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("TRSERVE_")}
    # The launcher gives its workers their share of the cores; that is part of what is tested.
    inherited.pop("OMP_NUM_THREADS", None)
    places = {"TMPDIR": str(runtime), "XDG_RUNTIME_DIR": str(runtime)}
    return {**inherited, **places, "HF_HUB_OFFLINE": "1", "HF_HOME": "/nonexistent"}


def run_command(
    args: Sequence[str], timeout_s: float = 60.0, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """``python -m trserve ARGS`` to its end; subprocess.TimeoutExpired if there is none.

    Fails if it leaves a process or a file behind.
    """
    mark = {_MARK: uuid.uuid4().hex}
    with tempfile.TemporaryDirectory(prefix="trs-", dir="/tmp") as runtime:
        done = subprocess.run(
            [sys.executable, "-m", "trserve", *args],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env={**server_env(Path(runtime)), **(env or {}), **mark},
        )
        orphans = wait_until(lambda: marked(_MARK, mark[_MARK]), lambda found: not found, 5.0)
        assert not orphans, [command(pid) for pid, _ in orphans]
        assert not os.listdir(runtime)
    return done


def wait_until(probe: Callable[[], T], good: Callable[[T], bool], timeout_s: float) -> T:
    """Polls ``probe`` until ``good``, at most ``timeout_s``; returns the last value either way."""
    deadline = time.monotonic() + timeout_s
    while not good(value := probe()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return value


def concurrently(function: Callable[[T], R], items: Sequence[T], concurrency: int) -> list[R]:
    """``function`` of every item, in order, at most ``concurrency`` at a time."""
    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(function, items))
