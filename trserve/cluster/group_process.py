"""One group's server as a child process: started, listened to, started again, ended.

Knows the ready line and exit codes; nothing of Ray, of other groups or of requests.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import IO, Final, NamedTuple

from trserve.errors import EXIT_UNAVAILABLE, EXIT_USAGE

log = logging.getLogger(__name__)
_READY: Final = re.compile(r"trserve ready (?P<url>\S+) models=(?P<models>\S+) (?P<rest>.*)")
_KEPT_LINES: Final = 20
_FOR_GOOD: Final = (EXIT_USAGE, EXIT_UNAVAILABLE)
LONGEST_PAUSE_S: Final = 30.0
LAST_WORDS_S: Final = 1.0
SETTLED_S: Final = 60.0
"""A server that served for so long is started again at once, the next time that it ends."""


class Status(NamedTuple):
    """How a group is.

    Attributes:
        url: where it serves; empty while it does not.
        ready_line: what it said of itself.
        detail: what it does, or why it does not serve.
        exit_code: set while it has never served and ends for what does not go away by itself.
    """

    url: str
    ready_line: str
    detail: str
    exit_code: int | None = None


class GroupProcess:
    """Runs ``trserve`` with ``arguments`` until it is stopped.

    Args:
        environment: what the process gets beside ours.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self._command = [sys.executable, "-m", "trserve.cluster.member", str(os.getpid())]
        self._command += arguments
        self._environment = {**os.environ, **environment}
        self._said: deque[str] = deque(maxlen=_KEPT_LINES)
        self._status = Status("", "", "starting")
        self._failures = 0
        self._start_at = 0.0
        self._process: subprocess.Popen[str] | None = None
        self._ears: list[threading.Thread] = []
        self._served_at: float | None = None
        self._ever_served = self._is_stopped = False

    def tick(self) -> Status:
        """Start it if it is due, notice its end; how it is now. To be called now and then.

        From the thread that lives as long as this process: a child ends with the thread that
        started it.
        """
        process, now = self._process, time.monotonic()
        if self._is_stopped:
            return self._status
        if process is not None and process.poll() is not None:
            self._note_end(process.returncode, now)
        elif process is None and now >= self._start_at:
            self._start()
        return self._status

    def _start(self) -> None:
        self._said.clear()
        self._served_at = None
        self._process = process = subprocess.Popen(
            self._command,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",  # else one byte would end the reading, and a full pipe the server
            process_group=0,
        )
        self._ears = []
        for stream, hear in ((process.stdout, self._hear_ready), (process.stderr, self._hear)):
            assert stream is not None
            ear = threading.Thread(target=_read, args=(stream, hear), daemon=True)
            self._ears.append(ear)
            ear.start()

    def _hear_ready(self, line: str) -> None:
        if found := _READY.fullmatch(line):
            self._served_at, self._ever_served = time.monotonic(), True
            self._status = Status(found["url"], line, "serving")

    def _hear(self, line: str) -> None:
        self._said.append(line)
        print(line, file=sys.stderr, flush=True)

    def _note_end(self, code: int, now: float) -> None:
        self._process = None
        for ear in self._ears:  # its last words are the cause
            ear.join(LAST_WORDS_S)
        cause = next((line for line in reversed(self._said) if line.strip()), "it said nothing")
        detail = f"ended with {code}: {cause}"
        settled = self._served_at is not None and now - self._served_at > SETTLED_S
        self._failures = 1 if settled else self._failures + 1
        self._start_at = now + min(2.0 ** min(self._failures - 1, 16) - 1, LONGEST_PAUSE_S)
        for_good = code in _FOR_GOOD and not self._ever_served
        again = "" if for_good else "; it is started again"
        self._status = Status("", "", detail + again, code if for_good else None)

    def stop(self, drain_s: float) -> int | None:
        """Drain it, kill it if it does not end in time; its exit code, None if it did not run."""
        process, self._process = self._process, None
        self._is_stopped = True
        self._status = Status("", "", "stopped", 0)
        if process is None:
            return None
        process.send_signal(signal.SIGTERM)
        try:
            return process.wait(drain_s + 5.0)
        except subprocess.TimeoutExpired:
            log.error("the group does not end within %g s of its drain time", drain_s)
            process.kill()
            return process.wait(5.0)


def _read(stream: IO[str], hear: object) -> None:
    """Pass on lines until the writer is gone."""
    assert callable(hear)
    with stream:
        for line in stream:
            hear(line.rstrip("\n"))
