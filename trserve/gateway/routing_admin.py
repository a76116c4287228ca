"""``/v1/trserve/routing``: what routing is set to, and changes of it while the server runs.

The launcher holds what is in force and tells the workers; this asks it, checks what an
administrator wants beforehand, and leaves one line in the log for each change. Knows no keys: who
may come here is decided at the front desk.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import orjson

from trserve.errors import RequestError
from trserve.gateway.replies import Handler, Receive, Scope, Send, read_body, send_json
from trserve.gateway.service import Service
from trserve.ipc.control import Message
from trserve.plan import ServerPlan
from trserve.router_lib.parameters import check_values
from trserve.router_lib.registry import TARGET_SHARE
from trserve.sched.table import ThresholdTable

log = logging.getLogger(__name__)
PATH: Final = "/v1/trserve/routing"
ANSWER_WITHIN_S: Final = 5.0
FRESH_S: Final = 0.5
AUTO: Final = "auto"
_ROUTER: Final = "router"
_THRESHOLD: Final = "batch_threshold"

_MOST_ROWS: Final = 4
_MAX_BYTES: Final = 2**20

Rows = dict[str, list[int]]


def _nobody(message: Message) -> None:
    """There is no launcher."""


class RoutingAdmin:
    """The route.

    Attributes:
        ask: sends a control message to the launcher, which answers it with one of its type.
    """

    def __init__(self, plan: ServerPlan, service: Service) -> None:
        self._plan = plan
        self._service = service
        self.ask: Callable[[Message], None] = _nobody
        self._numbers = itertools.count()
        self._open: dict[int, asyncio.Future[Message]] = {}
        # One change after the other, so that each line of the log says what it changed.
        self._turn = asyncio.Lock()
        self._seen: Message | None = None
        self._seen_s = 0.0

    @property
    def table(self) -> dict[str, dict[str, Handler]]:
        """The route and its methods."""
        return {PATH: {"GET": self._show, "POST": self._change}}

    def on_message(self, message: Message) -> bool:
        """Take in an answer of the launcher's; False where it is none."""
        if message["type"] != "routing":
            return False
        waiting = self._open.pop(message["number"], None)
        if waiting is not None and not waiting.done():
            waiting.set_result(message)
        return True

    async def in_force(self) -> dict[str, float | None]:
        """The values of the router's parameters, at most :data:`FRESH_S` old.

        Raises:
            RequestError: 503, the launcher does not answer.
        """
        async with self._turn:  # anybody may ask for this, and the launcher must not feel it
            if self._seen is None or time.monotonic() - self._seen_s > FRESH_S:
                self._seen, self._seen_s = await self._exchange({}), time.monotonic()
            return self._values(self._seen)

    async def _show(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._turn:
            state = await self._exchange({})
        await send_json(send, 200, orjson.dumps(self._body(state)))

    async def _change(self, scope: Scope, receive: Receive, send: Send) -> None:
        change = self._checked(await read_body(receive, _MAX_BYTES))
        visit = scope["state"]["connection"].visit
        who = "nobody" if visit.account is None else visit.account.name
        asked = f"by {who}, request {visit.request_id.decode()}"
        async with self._turn:
            before = await self._exchange({})
            try:
                after = await self._exchange(change)
            except RequestError:
                # The launcher may have it all the same: who reads the log must be able to know.
                log.warning("routing change requested %s, not confirmed: %s", asked, _told(change))
                raise
        lines = self._differences(before, after, change)
        self._service.metrics.threshold_overrides["server"] += "router" in change
        log.info("routing changed %s: %s", asked, "; ".join(lines) or "nothing")
        await send_json(send, 200, orjson.dumps(self._body(after)))

    async def _exchange(self, change: Mapping[str, Any]) -> Message:
        """Tell the launcher; RequestError (503) if it does not answer."""
        number = next(self._numbers)
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._open[number] = answer
        self.ask({"type": "routing", "number": number, **change})
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                return await answer
        except TimeoutError:
            raise RequestError(
                "the launcher does not answer; what was asked for may still come into force",
                status=503,
                code="no_answer",
                retry_after=1,
            ) from None
        finally:
            self._open.pop(number, None)

    # -- what is wanted ----------------------------------------------------------------------

    def _checked(self, raw: bytes) -> dict[str, Any]:
        """The change that a body asks for, as the launcher takes it. RequestError (400)."""
        try:
            body = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise RequestError(f"the body is no JSON: {error}") from None
        if not isinstance(body, dict) or not body or not set(body) <= {_ROUTER, _THRESHOLD}:
            raise RequestError(
                f"the body is an object with {_ROUTER!r}, {_THRESHOLD!r} or both", param=None
            )
        change: dict[str, Any] = {}
        if _ROUTER in body:
            change["router"] = self._router_values(body[_ROUTER])
        if _THRESHOLD in body:
            change["rows"] = self._rows(body[_THRESHOLD])
        return change

    def _router_values(self, given: object) -> dict[str, float]:
        """Numbers by name; null stands for the value that the server began with."""
        if not isinstance(given, dict):
            raise RequestError("router is an object of numbers by name", param=_ROUTER)
        known = [each for each in self._service.router_parameters if each.per_request]
        values = {
            name: self._service.router_values.get(name) if value is None else value
            for name, value in given.items()
        }
        if problem := check_values(values, self._plan.router, known):
            raise RequestError(problem, param=_ROUTER)
        self._check_not_steered(values)
        return {name: float(value) for name, value in values.items() if value is not None}

    def _check_not_steered(self, names: Collection[str]) -> None:
        """RequestError (409) for the parameter that a target share moves all the time."""
        share = self._plan.router_config.get(TARGET_SHARE.name, 0.0)
        if not share:
            return
        steered = self._service.router_parameters[0].name
        if steered in names:
            raise RequestError(
                f"{steered} follows {TARGET_SHARE.name} = {share} of this server's --router-config "
                "and cannot be set beside it; give it with single requests, or start the server "
                f"without {TARGET_SHARE.name}",
                status=409,
                param=_ROUTER,
                code="follows_target_share",
            )

    def _rows(self, given: object) -> Rows | None:
        """Rows of thresholds by the number of live requests; None for those of the start."""
        if given == AUTO:
            return None
        models = len(self._plan.models)
        most = min(self._plan.max_rows, self._plan.slots)
        by_number = given if isinstance(given, dict) else {}
        lists = list(by_number.values()) or [given]
        numbers = {str(n) for n in range(1, self._plan.slots + 1)}
        for row in lists:
            if not _is_vector(row, models, most) or not by_number.keys() <= numbers:
                raise RequestError(
                    f"batch_threshold is {AUTO!r}, or {models} whole numbers from 1 to {most}, one "
                    "a model, or an object of such lists by the number of live requests, 1 to "
                    f"{self._plan.slots}",
                    param=_THRESHOLD,
                )
        try:
            if by_number:
                table = ThresholdTable.from_rows(models, by_number)
            else:
                table = ThresholdTable.fixed(lists[0])
        except ValueError as error:
            raise RequestError(f"batch_threshold: {error}", param=_THRESHOLD) from None
        return {str(n): list(row) for n, row in table.rows.items()}

    # -- what is told ------------------------------------------------------------------------

    def _body(self, state: Message) -> dict[str, Any]:
        """What holds, and what may be given."""
        values = self._values(state)
        return {
            "router": {
                "name": self._plan.router,
                "parameters": {
                    each.name: {
                        "value": values.get(each.name),
                        "started_with": self._service.router_values.get(each.name),
                        "help": each.help,
                    }
                    for each in self._service.router_parameters
                    if each.per_request
                },
            },
            _THRESHOLD: {
                "source": self._source(state),
                "models": self._service.model_names,
                "rows": state["rows"],
            },
        }

    def _values(self, state: Message) -> dict[str, float | None]:
        return {**self._service.router_values, **state["router"]}

    def _source(self, state: Message) -> str:
        """Whose the thresholds are: an administrator's, the command line's or the solver's."""
        if state["held"]:
            return "admin"
        return AUTO if self._plan.batch_threshold is None else "start"

    def _differences(
        self, before: Message, after: Message, change: Mapping[str, Any]
    ) -> Sequence[str]:
        old, new = self._values(before), self._values(after)
        lines = [
            f"{name} from {_number(old[name])} to {_number(new[name])}"
            for name in change.get("router", ())
        ]
        if "rows" in change:
            lines.append(
                f"batch thresholds from {self._source(before)} {_short(before['rows'])} "
                f"to {self._source(after)} {_short(after['rows'])}"
            )
        return lines


def _is_vector(row: object, models: int, most: int) -> bool:
    return (
        isinstance(row, list)
        and len(row) == models
        and all(type(each) is int and 1 <= each <= most for each in row)
    )


def _number(value: float | None) -> str:
    """A value of the router's; one that it does not tell has none here."""
    return "its own" if value is None else f"{value:g}"


def _told(change: Mapping[str, Any]) -> str:
    """What a change asks for."""
    parts = [f"{name} to {value:g}" for name, value in change.get("router", {}).items()]
    if "rows" in change:
        rows = change["rows"]
        parts.append(f"batch thresholds to {AUTO if rows is None else _short(rows)}")
    return "; ".join(parts)


def _short(rows: Mapping[str, Sequence[int]]) -> str:
    """``8:1/3`` by the number of live requests; the last rows say the most."""
    parts = [f"{n}:{'/'.join(map(str, row))}" for n, row in rows.items()]
    if len(parts) > _MOST_ROWS:
        parts = ["...", *parts[-_MOST_ROWS:]]
    return ",".join(parts) or "eager"
