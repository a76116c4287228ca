"""One private MPS daemon for one GPU, from the launcher's side: started, proven, asked, ended.

Private: its pipe and log directories belong to this server alone, so that no other program finds
it by the usual place, and a fault stays among the workers of one GPU. It counts as running only
once it has answered, and a client has used the GPU through it. Knows no models; see ``side`` for
what a server does with its daemons.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from trserve.gpus.mps_control import LOG_DIRECTORY, PIPE_DIRECTORY, MpsControl
from trserve.gpus.mps_keeper import BACKGROUND, FAILED, KILL, QUIT, STARTS_WITHIN_S
from trserve.gpus.programs import MPS_CONTROL, DriverError, find_program, run_program
from trserve.gpus.topology import VISIBLE
from trserve.waiting import wait_readable

log = logging.getLogger(__name__)

END_WITHIN_S: Final = 10.0
"""For the daemon to quit, to be signalled, and to be killed."""
_KEEPER: Final = "trserve.gpus.mps_keeper"
_KEEPER_S: Final = 2 * STARTS_WITHIN_S + 2.0
_ANSWERS_WITHIN_S: Final = 5.0
_CLIENT_WITHIN_S: Final = 15.0
"""For the daemon to start its server with the first client, which takes some seconds."""
_LOOK_S: Final = 0.05


class MpsDaemon:
    """A daemon that answers, and takes in clients.

    Args:
        uuid: the GPU; it sees no other.
        directory: a path that does not exist yet, in a directory of this server alone.
        percent: the share of multiprocessors of clients that name none.

    Raises:
        DriverError: it cannot be had; nothing is left of it.
    """

    CLIENT: Sequence[str] = (sys.executable, "-m", "trserve.gpus.mps_client")

    def __init__(self, uuid: str, directory: Path, percent: int) -> None:
        program = find_program(MPS_CONTROL)
        self.pipe, self.logs = directory / "pipe", directory / "log"
        for path in (directory, self.pipe, self.logs):
            path.mkdir(mode=0o700)
        env = {VISIBLE: uuid, **self.environment, "PATH": _with_directory_of(program)}
        self.control = MpsControl(program, env)
        self._hangs = False
        self._keeper = subprocess.Popen(
            [sys.executable, "-m", _KEEPER, program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **env},
            process_group=0,
        )
        self._pidfd = -1
        try:
            self.how = self._started()
            self._until_it_answers()
            # Before any client: a server takes over at its own start what is the default then.
            self.control.set_default_percentage(percent)
            self._takes_in({VISIBLE: uuid, **self.environment})
        except DriverError:
            self.close()
            raise

    @property
    def environment(self) -> dict[str, str]:
        """What leads a client to it."""
        return {PIPE_DIRECTORY: str(self.pipe), LOG_DIRECTORY: str(self.logs)}

    @property
    def is_in_background(self) -> bool:
        """Whether it refused to run in the foreground, and forked away from its keeper."""
        return self.how == BACKGROUND

    def _started(self) -> str:
        """Wait for the keeper's line; returns how the daemon runs."""
        output = self._keeper.stdout
        assert output is not None
        ready = wait_readable(output.fileno(), _KEEPER_S)
        line = output.readline().decode().strip() if ready else ""
        how, _, rest = line.partition(" ")
        if not line:
            raise DriverError(f"the MPS daemon does not start within {_KEEPER_S:g} s")
        if how == FAILED:
            raise DriverError(rest)
        try:
            self._pidfd = os.pidfd_open(int(rest))
        except OSError as error:
            raise DriverError(f"the MPS daemon ends at once: {error.strerror}") from None
        return how

    def _until_it_answers(self) -> None:
        deadline = time.monotonic() + _ANSWERS_WITHIN_S
        while True:
            left = deadline - time.monotonic()
            try:
                self.control.probe(max(_LOOK_S, left))
            except DriverError:
                if left <= 0 or not self.is_alive:
                    raise
                time.sleep(_LOOK_S)
            else:
                return

    def _takes_in(self, env: Mapping[str, str]) -> None:
        """DriverError if a client, started as a worker is, cannot use the GPU."""
        try:
            run_program(self.CLIENT, timeout_s=_CLIENT_WITHIN_S, env={**os.environ, **env})
        except DriverError as error:
            raise DriverError(f"the daemon answers, and a client cannot use it: {error}") from None

    @property
    def is_alive(self) -> bool:
        """Whether its process has not ended."""
        return self._keeper.poll() is None and self._runs()

    def _runs(self) -> bool:
        """Whether the daemon itself does, whatever has become of its keeper."""
        if self._pidfd < 0:
            return False
        return not wait_readable(self._pidfd, 0.0)

    def is_well(self) -> bool:
        """Whether it answers, and none of its servers is in a fault."""
        if not self.is_alive or self._hangs:
            return False
        try:
            self.control.probe()
            return not self.control.has_fault()
        except DriverError as error:
            log.warning("%s", error)
            self._hangs = True
            return False

    def terminate_client(self, pid: int) -> bool:
        """Take process ``pid`` off the GPU, before it is killed; False if it was not on it.

        A daemon that does not answer is not asked again: each question costs its time.
        """
        if not self.is_alive or self._hangs:
            return False
        try:
            return self.control.terminate_client(pid)
        except DriverError as error:
            log.warning("process %d is killed without leaving the GPU first: %s", pid, error)
            self._hangs = True
            return False

    def retire(self) -> None:
        """Have it end; to be called when its clients are gone. Does not wait."""
        if self._keeper.stdin is not None and not self._keeper.stdin.closed:
            try:
                self._keeper.stdin.write(KILL if self._hangs else QUIT)
                self._keeper.stdin.close()
            except BrokenPipeError:
                log.info("the keeper of an MPS daemon has ended before it was told to")

    def close(self) -> None:
        """:meth:`retire`, and wait for it; safe to call twice."""
        self.retire()
        try:
            self._keeper.wait(END_WITHIN_S)
        except subprocess.TimeoutExpired:
            log.error("an MPS daemon does not end; it is killed with its keeper")
            os.killpg(self._keeper.pid, signal.SIGKILL)
            self._keeper.wait()
        if self._runs():  # its keeper was killed, and could not see to it
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        if self._keeper.stdout is not None:
            self._keeper.stdout.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


def _with_directory_of(program: str) -> str:
    """PATH with the place of ``program``, where the server program lies too."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(program).parent)])
