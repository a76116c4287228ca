"""The process that holds one MPS daemon: starts it, and leaves nothing of it behind.

The launcher's child. Its standard input is a pipe that only the launcher holds, so it ends with the
launcher however that ends; it is the parent (or, of what has forked away, the reaper) of the daemon
and its servers, and so can find all of them. That matters when the launcher was killed: workers
then have some seconds to leave the GPU, during which the daemon must stay, and afterwards nobody
else is left to end it.

On standard output goes one line, once the daemon runs: how it does, and its process id. A daemon
that ends by itself stays unreaped, so that this id means nobody else. Knows no models and no GPU.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from trserve.gpus.device_exit import EXIT_WITHIN_S
from trserve.gpus.mps_control import LOG_DIRECTORY, PIPE_DIRECTORY, MpsControl, daemon_pid
from trserve.gpus.programs import DriverError
from trserve.ipc.process import become_subreaper

FOREGROUND: Final = "foreground"
BACKGROUND: Final = "background"
FAILED: Final = "failed"
OUTPUT: Final = "control.out"
QUIT: Final = b"quit"
KILL: Final = b"kill"
"""What the launcher says before it closes the pipe: no client is left; nor does it answer."""

STARTS_WITHIN_S: Final = 5.0
_LEAVE_S: Final = EXIT_WITHIN_S + 1.0
"""How long clients may take to go once the launcher has: workers take this long, and a moment."""
_QUIT_S: Final = 3.0
_TERM_S: Final = 1.0
_LOOK_S: Final = 0.02


class Keeper:
    """One daemon, of the program and in the directories that the environment names."""

    def __init__(self, program: str) -> None:
        self._program = program
        self._pipe = Path(os.environ[PIPE_DIRECTORY])
        self._output = Path(os.environ[LOG_DIRECTORY]) / OUTPUT
        self._control = MpsControl(program, {})
        self.pid = 0

    def start(self) -> str:
        """Start it; returns how. Raises DriverError if it does not run.

        In the foreground, where it is a child like any other. One that refuses is started as it
        wants to be: it then forks away from us, and comes back to us as its reaper.
        """
        foreground = self._spawn("-f")
        if self._runs(foreground):
            self.pid = foreground.pid
            return FOREGROUND
        background = self._spawn("-d")
        found = self._forked_away(background)
        if found is None:
            raise DriverError(f"the MPS daemon ends at once: {self._last_words() or 'no word'}")
        self.pid = found
        return BACKGROUND

    def _spawn(self, flag: str) -> subprocess.Popen[bytes]:
        with open(self._output, "ab") as output:
            return subprocess.Popen(
                [self._program, flag], stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )

    def _runs(self, process: subprocess.Popen[bytes]) -> bool:
        deadline = time.monotonic() + STARTS_WITHIN_S
        while time.monotonic() < deadline and daemon_pid(self._pipe) is None:
            if process.poll() is not None:
                return False
            time.sleep(_LOOK_S)
        return process.poll() is None

    def _forked_away(self, process: subprocess.Popen[bytes]) -> int | None:
        deadline = time.monotonic() + STARTS_WITHIN_S
        while time.monotonic() < deadline:
            pid = daemon_pid(self._pipe)
            if pid is not None and pid in own_children():
                return pid
            if process.poll():
                return None
            time.sleep(_LOOK_S)
        return None

    def _last_words(self) -> str:
        with suppress(OSError):
            return " ".join(self._output.read_text(errors="replace").split())[-200:]
        return ""

    def end(self, said: bytes) -> None:
        """End the daemon and all that it has started, as the launcher ``said`` before it closed.

        If it said nothing it was killed, and clients may still be there.
        """
        if not said:
            self._let_clients_go()
        if self.pid and said != KILL and self._quits():
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in own_children():
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            if _all_reaped(time.monotonic() + _TERM_S):
                return

    def _quits(self) -> bool:
        try:
            self._control.quit()
        except DriverError as error:  # it hangs, or its directory has gone with the launcher
            print(f"trserve: {error}; it is killed", file=sys.stderr)
            return False
        return _all_reaped(time.monotonic() + _QUIT_S)

    def _let_clients_go(self) -> None:
        deadline = time.monotonic() + _LEAVE_S
        while time.monotonic() < deadline:
            with suppress(DriverError):
                if not self._control.clients():
                    return
            time.sleep(10 * _LOOK_S)


def _all_reaped(deadline: float) -> bool:
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return True
        if pid:
            continue
        if time.monotonic() >= deadline:
            return False
        time.sleep(_LOOK_S)


def own_children() -> set[int]:
    """The children of this process, those that came to it as their reaper included."""
    found = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError):  # it may end at any moment
            fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
            if int(fields[1]) == os.getpid():
                found.add(int(entry.name))
    return found


def _leave_it_to_the_launcher(number: int, frame: object) -> None:
    """A service manager or a terminal signals whole groups; the pipe says when it is time."""


def main() -> int:
    """Start a daemon, hold it until the launcher wants no more of it, end it."""
    become_subreaper()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # A handler, and not "ignored", which the daemon would inherit.
        signal.signal(number, _leave_it_to_the_launcher)
    keeper = Keeper(sys.argv[1])
    try:
        how = keeper.start()
    except (DriverError, OSError) as error:
        print(FAILED, error, flush=True)
        keeper.end(QUIT)
        return 1
    print(how, keeper.pid, flush=True)
    keeper.end(sys.stdin.buffer.read())
    return 0


if __name__ == "__main__":
    sys.exit(main())
