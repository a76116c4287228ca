"""What the server is doing right now, read from single-writer words. Changes nothing."""

from __future__ import annotations

from typing import Any, NamedTuple

from trserve.gateway.dispatcher import Dispatcher
from trserve.gateway.model_states import ModelStates
from trserve.ipc.layout import WORKER_WORDS
from trserve.ipc.slab import Slab
from trserve.plan import ServerPlan

_WORDS = tuple(word for word in WORKER_WORDS if word not in ("status", "heartbeat"))


class Load(NamedTuple):
    """A worker's steps since it began, and the requests that want its next one."""

    steps: int
    running: int


class Health:
    """Counts of requests, and the state and counts of each worker."""

    def __init__(
        self, plan: ServerPlan, slab: Slab, dispatcher: Dispatcher, states: ModelStates
    ) -> None:
        self._names = [model.name for model in plan.models]
        self._slab = slab
        self._states = states
        self._dispatcher = dispatcher

    def loads(self) -> list[Load]:
        """What each worker has done and has to do."""
        return [Load(words.get("steps"), words.get("running")) for words in self._slab.workers]

    def report(self) -> dict[str, Any]:
        """``requests`` by stage, and per model the words of its worker."""
        return {
            "requests": {
                "live": self._dispatcher.num_live,
                "waiting": self._dispatcher.num_waiting,
                "closing": self._dispatcher.num_closing,
            },
            "models": [
                {"name": name, "status": self._states.status(model)}
                | self._states.sharing(model)
                | {word: words.get(word) for word in _WORDS}
                for model, (name, words) in enumerate(
                    zip(self._names, self._slab.workers, strict=True)
                )
            ],
        }
