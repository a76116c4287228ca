"""``GET /v1/trserve/about``: what a client may choose from, without an administrator's key.

The models in the order of ``--models``, and the router's parameters with their bounds and the
values in force. Knows no requests and changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import orjson

from trserve import __version__
from trserve.gateway.replies import Handler, Receive, Scope, Send, send_json
from trserve.gateway.service import Service
from trserve.router_lib.parameters import Parameter

PATH: Final = "/v1/trserve/about"

Values = Mapping[str, float | None]


class About:
    """The route.

    Args:
        in_force: the values of the router's parameters now; RequestError if nobody says.
        is_loaded: whether a worker has loaded the router; nobody knows its parameters before.
        administrable: whether anybody may change them for the whole server.
    """

    def __init__(
        self,
        service: Service,
        in_force: Callable[[], Awaitable[Values]],
        is_loaded: Callable[[], bool],
        *,
        administrable: bool = False,
    ) -> None:
        self._service = service
        self._in_force = in_force
        self._is_loaded = is_loaded
        self._administrable = administrable

    @property
    def table(self) -> dict[str, dict[str, Handler]]:
        """The route and its method."""
        return {PATH: {"GET": self._show}}

    async def _show(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        values = await self._in_force() if service.router_parameters else {}
        body = {
            "version": __version__,
            "served_models": list(service.served_names),
            "device": service.plan.device,
            "max_model_len": service.max_prompt_and_output,
            "models": [self._model(index) for index in range(len(service.model_names))],
            "router": {
                "name": service.plan.router,
                "known": self._is_loaded(),
                "parameters": [
                    _described(each, values)
                    for each in service.router_parameters
                    if each.per_request
                ],
            },
            "routing_can_be_changed": self._administrable,
        }
        await send_json(send, 200, orjson.dumps(body))

    def _model(self, index: int) -> dict[str, Any]:
        service = self._service
        return {
            "name": service.model_names[index],
            "status": service.states.status(index),
            "active_parameters": service.plan.models[index].active_parameters,
        }


def _described(parameter: Parameter, values: Values) -> dict[str, Any]:
    """JSON has no infinity: a side without a bound is null."""
    return {
        "name": parameter.name,
        "help": parameter.help,
        "value": values.get(parameter.name),
        "minimum": _finite(parameter.minimum),
        "maximum": _finite(parameter.maximum),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
