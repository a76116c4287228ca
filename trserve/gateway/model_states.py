"""Which models can write right now, as the launcher says, and what that means for requests.

A model that is *down* comes back: requests wait for it, and the server is not ready. One that is
*lost* does not: the server is ready again, requests begin at a model that is left, and those that
might have visited the lost one are marked as degraded. Knows no HTTP, no slots and no processes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final

from trserve.errors import RequestError
from trserve.gateway.model_links import ELSEWHERE, UNREACHABLE, ModelLinks
from trserve.ipc.control import Message
from trserve.ipc.slab import Slab, WorkerStatus

_KINDS: Final = ("up", "restarting", "lost")


class ModelStates:
    """The state of every model.

    Attributes:
        down: what happened to those that come back, by index.
        lost: what happened to those that do not.
        restarts: how often each came back, as far as this process knows.
        links: those at other hosts; None where every model is here.
        mps: of each model on a GPU, ``off``, ``on`` or ``unavailable`` and why; empty without GPUs.
    """

    def __init__(self, names: Sequence[str], links: ModelLinks | None = None) -> None:
        self._names = names
        self.down: dict[int, str] = {}
        self.lost: dict[int, str] = {}
        self.restarts = [0] * len(names)
        self.links = links
        self.mps: Sequence[tuple[str, str]] = ()

    def read(self, slab: Slab) -> None:
        """Take over what the launcher says in the slab; for a process that missed its messages."""
        for model, words in enumerate(slab.workers):
            status, name = words.get("status"), self._names[model]
            if status == WorkerStatus.RESTARTING:
                self.down.setdefault(model, f"the worker of {name} is being restarted")
            elif status == WorkerStatus.LOST:
                self.lost.setdefault(model, f"the worker of {name} could not be restarted")

    def on_message(self, message: Message) -> bool:
        """Take in a message of the launcher; False if it is about something else."""
        kind = message["type"]
        if kind == "mps":
            self.mps = [(state, reason) for state, reason in message["models"]]
            return True
        if kind not in ("worker_down", "worker_up", "worker_lost"):
            return False
        model = int(message["model"])
        reason = self.down.pop(model, None)
        if kind == "worker_down":
            self.down[model] = message["message"]
        elif kind == "worker_lost":
            self.lost[model] = message["message"]
        elif reason is not None:
            self.restarts[model] += 1
        return True

    @property
    def unready(self) -> str | None:
        """Why the server is not ready; None if every model that is left can write."""
        links = () if self.links is None else self.links.unready
        return "; ".join((*self.down.values(), *links)) or None

    @property
    def missing(self) -> list[str]:
        """Which models the server does without, and why."""
        return [*self.lost.values(), *(() if self.links is None else self.links.away)]

    @property
    def kinds(self) -> tuple[str, ...]:
        """What :meth:`status` may say."""
        return _KINDS if self.links is None else (*_KINDS, UNREACHABLE, ELSEWHERE)

    def status(self, model: int) -> str:
        """``up``, ``restarting`` or ``lost``; of a model at another host also what its link is."""
        if model in self.lost:
            return "lost"
        if model in self.down:
            return "restarting"
        return (self.links.status(model) if self.links is not None else None) or "up"

    def sharing(self, model: int) -> dict[str, str]:
        """How ``model`` shares its GPU, for people; nothing where it is on none."""
        if model >= len(self.mps):
            return {}
        state, reason = self.mps[model]
        return {"mps": state} | ({"mps_reason": reason} if reason else {})

    def place(self, entry: int, *, fixed: bool) -> int:
        """The model that writes first where ``entry`` was meant to.

        Raises:
            RequestError: 503, ``entry`` is lost and (``fixed``) no other will do.
        """
        if entry not in self.lost:
            return entry
        left = [model for model in range(len(self._names)) if model not in self.lost]
        if fixed or not left:
            raise RequestError(
                f"the model {self._names[entry]!r} is not available: {self.lost[entry]}",
                status=503,
                param="trserve",
                code="model_unavailable",
            )
        return left[0]

    def watch(self, models: Collection[int]) -> Callable[[], bool]:
        """Tells, whenever it is called, whether any of ``models`` is lost, or was out of reach."""

        def is_lost() -> bool:
            return bool(self.lost) and any(model in self.lost for model in models)

        if self.links is None:
            return is_lost
        was_away = self.links.watch(models)
        return lambda: is_lost() or was_away()
