"""Which model writes first and which may write at all, from the names in a request.

Beside the endpoint's own names, which leave it to the router, each member model is served under
its name as an alias: it writes the whole answer. Knows no tokens, no slots and no HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from trserve.errors import RequestError
from trserve.gateway.model_states import ModelStates
from trserve.gateway.request_values import check_name
from trserve.gateway.requests import GenerationRequest
from trserve.plan import ServerPlan


class Placement(msgspec.Struct, frozen=True):
    """Which model writes first, and whether no other may.

    Without ``admit`` the request itself names the model, and no other can take its place.
    """

    entry: int
    pinned: bool
    admit: bool


class Placements:
    """The places of requests.

    Attributes:
        aliases: the member models that are served under their own names.
    """

    def __init__(self, plan: ServerPlan, states: ModelStates) -> None:
        self._router = plan.router
        self._served = plan.served_names
        self._models = [model.name for model in plan.models]
        self._lengths = {model.name: model.max_model_len for model in plan.models}
        self._shortest = min(self._lengths.values())
        self._states = states
        self._elsewhere = frozenset(m.name for m in plan.models if m.place.is_placeholder)
        self._here = [name for name in self._models if name not in self._elsewhere]
        self.aliases = [name for name in self._here if name not in self._served]

    def check_model(self, name: str | None) -> None:
        """Raise RequestError (404) unless ``name`` is served here; no name means the first.

        One that is too long to be repeated is refused for that (400).
        """
        check_name("model", name)
        if name is None or name in self._served or name in self.aliases:
            return
        served = ", ".join((*self._served, *self.aliases))
        raise RequestError(
            f"the model {name!r} does not exist; served here: {served}",
            status=404,
            param="model",
            code="model_not_found",
        )

    def max_model_len(self, name: str) -> int:
        """The longest row of the model that is served as ``name``."""
        return self._lengths[name] if name in self.aliases else self._shortest

    def of(self, request: GenerationRequest) -> Placement:
        """The place of ``request``. Raises RequestError if its names contradict each other."""
        self.check_model(request.model)
        alias = request.model if request.model in self.aliases else None
        if alias is not None and request.only not in (None, alias):
            raise RequestError(
                f"model names {alias!r} alone and trserve.only another one", param="trserve.only"
            )
        only = self._index(request.only or alias, "trserve.only" if request.only else "model")
        entry = self._index(request.entry_model, "trserve.entry_model")
        if only is not None:
            if entry not in (None, only):
                where = "trserve.only" if request.only else "model"
                raise RequestError(
                    f"trserve.entry_model and {where} name different models",
                    param="trserve.entry_model",
                )
            return Placement(only, pinned=True, admit=False)
        if self._elsewhere:
            # The other models are at home with whoever dials in, and not for this host's clients.
            entry = self._models.index(self._here[0]) if entry is None else entry
            return Placement(self._states.place(entry, fixed=True), pinned=True, admit=False)
        if entry is not None:
            return Placement(entry, pinned=False, admit=False)
        return Placement(0, pinned=False, admit=True)

    def _index(self, name: str | None, param: str) -> int | None:
        if name is None:
            return None
        if name not in self._models:
            raise RequestError(
                f"{param}: no model {name!r}; models: {', '.join(self._here)}", param=param
            )
        if name in self._elsewhere:
            raise RequestError(
                f"{param}: the model {name!r} is at another host, which dials in here; models: "
                f"{', '.join(self._here)}",
                param=param,
            )
        return self._states.place(self._models.index(name), fixed=True)

    def visits(self, placement: Placement) -> Sequence[int]:
        """The models that a request may visit."""
        if placement.pinned or self._router == "none":
            return (placement.entry,)
        return range(len(self._models))
