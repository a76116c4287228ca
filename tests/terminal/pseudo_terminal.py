"""A command of trserve's in a pseudo-terminal: what it shows, and keys. Waits have bounds."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from types import TracebackType

CTRL_C, CTRL_D = "\x03", "\x04"
LIMIT_S = 15.0
PROMPT = "> "
_ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[a-zA-Z]|[()][AB0]|[=>])")


class PseudoTerminal:
    """``python -m trserve ARGS`` with a terminal of its own; use as a context manager."""

    def __init__(
        self, args: Sequence[str], env: Mapping[str, str] | None = None, columns: int = 110
    ) -> None:
        self._args = [sys.executable, "-m", "trserve", *args]
        self._env = {**os.environ, "TERM": "xterm-256color", **(env or {})}
        self._env = {name: value for name, value in self._env.items() if value}
        self._columns = columns
        self.raw = ""
        self._seen = 0

    def __enter__(self) -> PseudoTerminal:
        self._own, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, self._columns, 0, 0))
        self.process = subprocess.Popen(
            self._args,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=self._env,
            start_new_session=True,
            # So that Ctrl-C is a signal, as at anybody's terminal.
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(theirs)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        os.close(self._own)

    @property
    def text(self) -> str:
        """What it has written, without escape sequences."""
        return plain(self.raw)

    def send(self, text: str) -> None:
        """Press these keys; what is expected from now on comes afterwards."""
        self._seen = len(self.raw)
        os.write(self._own, text.encode())

    def answer(self, text: str) -> None:
        """Press these keys once a prompt waits for them: before, they mean other things."""
        deadline = time.monotonic() + LIMIT_S
        while not self.text.endswith(PROMPT):
            left = deadline - time.monotonic()
            assert left > 0, f"no prompt within {LIMIT_S} s:\n{self.text}"
            assert self._read(left), f"it ended without a prompt:\n{self.text}"
        self.send(text)

    def expect(self, words: str) -> str:
        """What was written since the last keys, once ``words`` are in it."""
        deadline = time.monotonic() + LIMIT_S
        while words not in plain(self.raw[self._seen :]):
            left = deadline - time.monotonic()
            assert left > 0, f"no {words!r} within {LIMIT_S} s in:\n{self.text}"
            assert self._read(left), f"it ended without {words!r}:\n{self.text}"
        return plain(self.raw[self._seen :])

    def end_by(self, keys: str) -> int:
        """Press ``keys`` at a prompt until it ends; the exit code.

        A signal between the moment that a prompt is shown and the read behind it wakes nobody.
        """
        self.answer(keys)
        deadline = time.monotonic() + LIMIT_S
        while self._read(1.0):
            assert time.monotonic() < deadline, f"it goes on:\n{self.text}"
            if self.text.endswith(PROMPT):
                self.send(keys)
        return self.process.wait(LIMIT_S)

    def wait(self) -> int:
        """The exit code; what is still written is read."""
        deadline = time.monotonic() + LIMIT_S
        while self._read(deadline - time.monotonic()):
            assert time.monotonic() < deadline, f"it goes on:\n{self.text}"
        return self.process.wait(LIMIT_S)

    def _read(self, timeout_s: float) -> bool:
        """Read what there is; False at the end."""
        if not select.select([self._own], [], [], max(0.0, timeout_s))[0]:
            return True
        try:
            data = os.read(self._own, 65536)
        except OSError:
            return False  # Linux says EIO once nobody has the other end
        self.raw += data.decode(errors="replace")
        return bool(data)


def plain(raw: str) -> str:
    """``raw`` without escape sequences and carriage returns."""
    return _ESCAPES.sub("", raw).replace("\r", "")
