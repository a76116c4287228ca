"""The language of the MPS control daemon: questions and orders to one, through its own program.

Each is one run of the control program, which finds the daemon by its pipe directory, with a bound
on how long it may take: a daemon that hangs must not hang the launcher. Knows no processes of a
server beyond their process ids.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from trserve.gpus.programs import DriverError, run_program

PIPE_DIRECTORY: Final = "CUDA_MPS_PIPE_DIRECTORY"
LOG_DIRECTORY: Final = "CUDA_MPS_LOG_DIRECTORY"
PID_FILE: Final = "nvidia-cuda-mps-control.pid"
FAULT: Final = "FAULT"

ANSWER_S: Final = 2.0
"""How long a question may take: the daemon answers from memory."""
QUIT_S: Final = 4.0

_NUMBER: Final = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*$", re.MULTILINE)


class Client(NamedTuple):
    """A process on the GPU, and the MPS server that it is a client of."""

    pid: int
    server: int


class MpsControl:
    """Speaks to the daemon of one pipe directory.

    Every method raises DriverError if there is none, or it does not answer.
    """

    def __init__(self, program: str, env: Mapping[str, str]) -> None:
        self._program = program
        self._env = {**os.environ, **env}

    def ask(self, command: str, *, timeout_s: float = ANSWER_S) -> str:
        """The daemon's answer to ``command``."""
        return run_program([self._program], command + "\n", timeout_s=timeout_s, env=self._env)

    def probe(self, timeout_s: float = ANSWER_S) -> float:
        """The default share of multiprocessors in percent: a question that any live one answers."""
        command = "get_default_active_thread_percentage"
        answer = self.ask(command, timeout_s=timeout_s)
        found = _NUMBER.search(answer)
        if found is None:
            raise DriverError(f"the MPS daemon answers {answer[:80]!r} to {command}")
        return float(found[1])

    def set_default_percentage(self, percent: int) -> None:
        """For clients that say nothing. Only servers that start later take it over."""
        self.ask(f"set_default_active_thread_percentage {percent}")

    def servers(self) -> list[int]:
        """Process ids of the daemon's servers: one a user, none before the first client."""
        return self._pids("get_server_list")

    def clients(self) -> list[Client]:
        """Everybody on the GPU."""
        return [
            Client(pid, server)
            for server in self.servers()
            for pid in self._pids(f"get_client_list {server}")
        ]

    def has_fault(self) -> bool:
        """Whether a server had a fault and still refuses clients."""
        return any(FAULT in self.ask(f"get_server_status {server}") for server in self.servers())

    def terminate_client(self, pid: int) -> bool:
        """End all that process ``pid`` has on the GPU; False if it is no client here.

        The process lives on, and can then be killed: a signal alone, while its work is on the GPU,
        leaves the server undefined. Only one whose id this very daemon lists is touched.
        """
        for client in self.clients():
            if client.pid == pid:
                self.ask(f"terminate_client {client.server} {client.pid}")
                return True
        return False

    def quit(self) -> None:
        """End the daemon and its servers, which may have to end before it answers."""
        self.ask("quit", timeout_s=QUIT_S)

    def _pids(self, command: str) -> list[int]:
        return [int(word) for word in self.ask(command).split() if word.isdigit()]


def daemon_pid(pipe: Path) -> int | None:
    """The daemon's own word for who it is; None before it has started."""
    try:
        text = (pipe / PID_FILE).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return int(text) if text.isdigit() else None
