"""What the slab says of models at other hosts, and what that means for requests.

The link agents say it in words of their own, so that nothing here comes too early or too late for
a token. Knows no sockets, no HTTP and no slots.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

from trserve.errors import RequestError
from trserve.ipc.fence import load_fence
from trserve.ipc.layout import WORKER_WORDS
from trserve.ipc.slab import Reach, Slab
from trserve.plan import ServerPlan
from trserve.restarts import DEGRADE

_REACH: Final = WORKER_WORDS.index("reach")
_OUTAGES: Final = WORKER_WORDS.index("outages")
UNREACHABLE: Final = "unreachable"
ELSEWHERE: Final = "elsewhere"


class ModelLinks:
    """The models of ``plan`` that are elsewhere.

    Attributes:
        places: where each is, by index.
        placeholders: those that stand for a model of whoever dials in.
    """

    def __init__(self, plan: ServerPlan, slab: Slab) -> None:
        remote = [(i, model) for i, model in enumerate(plan.models) if model.remote]
        self.placeholders = frozenset(i for i, model in remote if model.place.is_placeholder)
        self.places = {i: model.remote for i, model in remote if i not in self.placeholders}
        self._names = [model.name for model in plan.models]
        self._words = {i: slab.workers[i].words for i in self.places}
        self._goes_on = plan.on_peer_loss == DEGRADE

    def _reach(self, model: int) -> Reach:
        return Reach(self._words[model][_REACH])

    def status(self, model: int) -> str | None:
        """``unreachable``, ``elsewhere``, or None for one of which there is nothing to say."""
        if model in self.placeholders:
            return ELSEWHERE
        away = model in self.places and self._reach(model) is not Reach.HERE
        return UNREACHABLE if away else None

    @property
    def away(self) -> list[str]:
        """What is out of reach, for people."""
        return [self._say(model) for model in self.places if self._reach(model) is not Reach.HERE]

    @property
    def unready(self) -> list[str]:
        """What is out of reach where requests that go there end with an error."""
        return [self._say(model) for model in self.places if self._reach(model) is Reach.FAILS]

    def _say(self, model: int) -> str:
        return f"the model {self._names[model]} at {self.places[model]} cannot be reached"

    def watch(self, models: Collection[int]) -> Callable[[], bool]:
        """Tells, whenever it is called, whether any of ``models`` was done without since now.

        Who waits for a model that is out of reach does not do without it, nor does who ends.
        """
        words = [self._words[model] for model in models if model in self._words]
        if not words or not self._goes_on:
            return bool
        before = sum(each[_OUTAGES] for each in words)
        # In this order: a link agent says that a model is away before it counts that.
        load_fence()
        if any(each[_REACH] == Reach.ALONE for each in words):
            return lambda: True
        return lambda: sum(each[_OUTAGES] for each in words) != before

    def failure(self, model: int) -> RequestError | None:
        """What it means that a request ended there for want of its model; None for one here."""
        if model not in self.places:
            return None
        message = f"{self._say(model)}; try again later"
        return RequestError(message, status=503, code="model_unreachable", retry_after=1)


def links_of(plan: ServerPlan, slab: Slab) -> ModelLinks | None:
    """The models of ``plan`` that are elsewhere; None if there are none."""
    return ModelLinks(plan, slab) if any(model.remote for model in plan.models) else None
