"""The supervisor process of an engine, as the program that embeds it sees it.

Knows how to start it, what it says and how to be rid of it; nothing of requests.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, Final

import msgspec
import orjson

from trserve.errors import StartupError
from trserve.ipc.shared import Shared
from trserve.plan import ServerPlan

STOP_TIMEOUT_S: Final = 15.0


def startup_error(message: str, exit_code: int) -> StartupError:
    """What ``trserve launch`` would have ended with."""
    error = StartupError(message)
    error.exit_code = exit_code
    return error


class HostProcess:
    """The supervisor process beside the program.

    Args:
        environment: variables for it and its processes, beside those of the program.
    """

    def __init__(self, plan: ServerPlan, environment: Mapping[str, str]) -> None:
        shared = Shared.create(plan.layout)
        self.shared: Shared | None = shared
        self._process = subprocess.Popen(
            [sys.executable, "-m", "trserve.host"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(shared.slab_fd, *shared.bells),
            process_group=0,
            env={**os.environ, **environment},
        )
        request = {
            "plan": msgspec.to_builtins(plan),
            "owner_pid": os.getpid(),
            "slab_fd": shared.slab_fd,
            "bells": list(shared.bells),
        }
        assert self._process.stdin is not None
        self._process.stdin.write(orjson.dumps(request) + b"\n")
        self._process.stdin.close()
        line = self.read_line()
        if "control" not in line:
            self.close()
            raise startup_error(line.get("failed", "no answer"), line.get("exit_code", 3))
        self.control_endpoint: str = line["control"]

    @property
    def output_fd(self) -> int:
        """Readable when the supervisor has something to say, or has ended."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def read_line(self) -> dict[str, Any]:
        """Its next line; empty at its end."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        found: dict[str, Any] = orjson.loads(line) if line else {}
        return found

    def close(self) -> None:
        """Wait for its end, and see to it; give back what was shared."""
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shared, self.shared = self.shared, None
        if shared is not None:
            for fd in (shared.slab_fd, *shared.bells):
                os.close(fd)
