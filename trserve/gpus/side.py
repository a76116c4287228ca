"""The launcher's hand on the GPUs: a daemon for each that is shared, and what workers are given.

Puts the plan's GPUs and the daemons together: started before any worker, asked before a worker is
killed, made anew with the workers that share a GPU, ended after the last one. For a server without
GPUs it is here too, and does nothing. Knows no slab, no messages and no policy of restarts.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from trserve.children import Process
from trserve.errors import StartupError
from trserve.gpus.mps import MpsDaemon
from trserve.gpus.mps_control import PIPE_DIRECTORY
from trserve.gpus.plan import ON, GpuPlan, MpsState, restart_unit
from trserve.gpus.programs import DriverError
from trserve.gpus.topology import VISIBLE

DEVICE_ORDER: Final = "CUDA_DEVICE_ORDER"
PERCENTAGE: Final = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
MEMORY_LIMIT: Final = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
_MIB: Final = 2**20


class ClientProcess:
    """A worker that may be on a GPU through MPS: it is taken off before it is killed."""

    def __init__(self, process: subprocess.Popen[bytes], side: GpuSide, model: int) -> None:
        self._process = process
        self._side = side
        self._model = model

    @property
    def returncode(self) -> int | Any:
        """Its exit status, once it has been waited for."""
        return self._process.returncode

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def kill(self) -> None:
        """End it now: its work on the GPU, then itself. Nothing, if it has ended."""
        if self._process.poll() is None:
            self._side.terminate_client(self._model, self._process.pid)
            self._process.kill()

    def poll(self) -> int | None:
        """Its exit status, None while it runs."""
        return self._process.poll()

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status, once it has ended."""
        return self._process.wait(timeout)


class GpuSide:
    """The GPUs of one server.

    Args:
        plan: which there are; nothing is done for an empty one.
        directory: the server's private directory.
        note: says something to people.

    Attributes:
        on_change: called when what :meth:`states` returns has changed.
    """

    def __init__(self, plan: GpuPlan, directory: Path, note: Callable[[str], None]) -> None:
        self._plan = plan
        self._directory = directory
        self._note = note
        self._daemons: dict[str, MpsDaemon] = {}
        self._retired: list[MpsDaemon] = []
        self._reasons: dict[str, str] = {}
        self._made = 0
        self.on_change: Callable[[], None] = _nothing

    # -- daemons -----------------------------------------------------------------------------

    def start(self) -> None:
        """Start the daemons that are wanted.

        Raises StartupError where one cannot be had and ``--mps on`` asks for it; with ``auto`` the
        models on that GPU take turns, and people are told.
        """
        for gpu in self._plan.clients:
            self._start(gpu)

    def _start(self, gpu: str) -> None:
        path = self._directory / f"mps-{self._made}"
        self._made += 1
        models = self._plan.clients[gpu]
        try:
            daemon = MpsDaemon(gpu, path, max(self._plan.percentages[model] for model in models))
        except DriverError as error:
            if self._plan.mps == ON:
                raise StartupError(
                    f"--mps on: there is no MPS on {gpu}: {error}\nuse --mps auto, with which "
                    "models on one GPU take turns where it cannot be had"
                ) from None
            self._lose(gpu, str(error))
            return
        self._daemons[gpu] = daemon
        self._reasons.pop(gpu, None)
        if daemon.is_in_background:
            self._note(f"the MPS daemon of {gpu} refuses to run in the foreground, and was let go")
        self.on_change()

    def _lose(self, gpu: str, reason: str) -> None:
        self._reasons[gpu] = reason
        self._note(f"no MPS on {gpu}, so models on it take turns: {reason}")
        self.on_change()

    def renew(self, model: int) -> str | None:
        """See to it that the unit of ``model``, all of whose workers are gone, can start again.

        Returns why it cannot. A daemon that answers and has no fault stays; any other, or one that
        the workers did not really use, is replaced.
        """
        gpu = self._plan.gpu_under_mps(model)
        daemon = self._daemons.get(gpu) if gpu is not None else None
        if gpu is None or daemon is None:
            return None  # its workers run without: one that joined them with MPS would not help
        if gpu not in self._reasons and daemon.is_well():
            return None
        del self._daemons[gpu]
        daemon.retire()
        self._retired.append(daemon)
        try:
            self._start(gpu)
        except StartupError as error:
            return str(error).partition("\n")[0]
        return None

    def look(self) -> None:
        """Notice daemons that have ended; their GPU's workers hold on to what they have."""
        for gpu, daemon in self._daemons.items():
            if gpu not in self._reasons and not daemon.is_alive:
                self._lose(gpu, "the daemon has ended; it comes back with the GPU's workers")

    def close(self) -> None:
        """End all daemons; to be called when no worker is left. Safe to call twice."""
        closing = [*self._daemons.values(), *self._retired]
        for daemon in closing:
            daemon.retire()
        for daemon in closing:
            daemon.close()
        self._daemons.clear()
        self._retired.clear()

    # -- workers -----------------------------------------------------------------------------

    def environment(self, model: int, rank: int = 0) -> dict[str, str]:
        """What a process of ``model`` must find in its environment before CUDA looks at it."""
        if model >= len(self._plan.uuids) or not self._plan.uuids[model]:
            return {}
        gpu = self._plan.uuids[model][rank]
        env = {VISIBLE: gpu, DEVICE_ORDER: "PCI_BUS_ID"}
        daemon = self._daemons.get(gpu) if self._plan.gpu_under_mps(model) == gpu else None
        if daemon is None:
            # CUDA looks for a daemon in a usual place; here is none, and nobody else's is used.
            return {**env, PIPE_DIRECTORY: str(self._directory / "no-mps")}
        env |= {**daemon.environment, PERCENTAGE: str(self._plan.percentages[model])}
        if limit := self._plan.memory_limits[model]:
            # The only GPU that the process sees is its number 0.
            env[MEMORY_LIMIT] = f"0={limit // _MIB}M"
        return env

    def process(self, process: Process, model: int) -> Process:
        """``process``, which is one of ``model``, so that killing it does the GPU no harm."""
        if not isinstance(process, subprocess.Popen) or self._plan.gpu_under_mps(model) is None:
            return process
        return ClientProcess(process, self, model)

    def terminate_client(self, model: int, pid: int) -> None:
        """Take the process ``pid`` of ``model`` off its GPU, if it is on it through MPS."""
        gpu = self._plan.gpu_under_mps(model)
        if gpu is not None and gpu in self._daemons:
            self._daemons[gpu].terminate_client(pid)

    def unit(self, model: int) -> frozenset[int]:
        """The models whose workers are replaced together with that of ``model``."""
        gpu = self._plan.gpu_under_mps(model)
        if gpu is None or gpu not in self._daemons:
            return frozenset((model,))
        return restart_unit(self._plan, model)

    def on_ready(self, model: int, uses_mps: bool | None) -> str | None:
        """A worker says whether its device is used through MPS; why the server must end, if so.

        CUDA runs without MPS, and says nothing, when it cannot reach the daemon.
        """
        gpu = self._plan.gpu_under_mps(model)
        if gpu is None or gpu not in self._daemons or uses_mps is not False:
            return None
        reason = f"the worker of model {model} does not use it, although the daemon answers"
        if self._plan.mps == ON:
            return f"--mps on: {reason}"
        if gpu not in self._reasons:
            self._lose(gpu, reason)
        return None

    # -- what there is -----------------------------------------------------------------------

    def states(self) -> list[tuple[MpsState, str]]:
        """How it is with MPS for each model, and why where it is not to be had."""
        return [self._state(model) for model in range(len(self._plan.uuids))]

    def _state(self, model: int) -> tuple[MpsState, str]:
        gpu = self._plan.gpu_under_mps(model)
        if gpu is None:
            return MpsState.OFF, ""
        if gpu in self._reasons:
            return MpsState.UNAVAILABLE, self._reasons[gpu]
        return (MpsState.ON, "") if gpu in self._daemons else (MpsState.OFF, "")


def _nothing() -> None:
    """Nobody wants to know."""
