"""One endpoint for several groups: a request goes to one of them, its answer comes back as it is.

A request whose group cannot be reached goes to another, as nothing of it was answered. What
concerns the server goes to all. Knows no models, no tokens and no supervisors.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import aiohttp
import orjson

from trserve import __version__
from trserve.cluster.affinity import Affinity
from trserve.cluster.asked import affinities
from trserve.cluster.courier import Courier
from trserve.cluster.groups import Group, Groups
from trserve.cluster.standing import PATH as CHANGE
from trserve.cluster.standing import StandingChange
from trserve.cluster.watching import Watched, left, unless
from trserve.endpoint_plan import EndpointPlan
from trserve.errors import RequestError
from trserve.gateway.access import ANYONE, asks_deep
from trserve.gateway.desk import Desk
from trserve.gateway.replies import (
    Receive,
    Scope,
    Send,
    send_body,
    send_error,
    send_json,
)
from trserve.gateway.responses import error_body
from trserve.gateway.visit import Visit

FLUSH: Final = "/flush_cache"
ABORT: Final = "/abort_request"
EVERYWHERE: Final = frozenset({CHANGE, FLUSH, ABORT})
"""What one asks of the server means every group of it."""

ONE_OF_THEM: Final = "/v1/trserve/requests/"
WATCH: Final = "/v1/trserve/stats/stream"
"""An answer that ends only with its server, so that nobody waits for it to end."""

_ID: Final = b"x-request-id"
_LABELS: Final = [(b"server", b"trserve"), (b"x-trserve-version", __version__.encode())]
_Answer = tuple[Group, int, bytes]

ANYBODYS: Final = EndpointPlan()


class Forwarding:
    """The ASGI callable.

    Args:
        key: what the groups ask of whoever speaks to them, in the place of the client's own; None
            where the client's key is theirs to check as well.
        endpoint: who may ask and who may administer; which pages may read what is answered here.

    Attributes:
        describe: gives more members for ``/v1/trserve/groups``.
        choices: how often each reason decided.
    """

    def __init__(
        self,
        groups: Groups,
        affinity: Affinity,
        session: aiohttp.ClientSession,
        key: str | None = None,
        endpoint: EndpointPlan = ANYBODYS,
    ) -> None:
        self._desk = Desk(endpoint, _LABELS)
        self._asks_keys = bool(endpoint.api_keys)
        self._groups = groups
        self._affinity = affinity
        self._courier = Courier(session, key, groups.lose)
        self._standing = StandingChange(session)
        self._changes: set[asyncio.Task[tuple[int, bytes]]] = set()
        groups.on_return = self._standing.bring
        self.describe: Callable[[], dict[str, Any]] = dict
        self._drains = asyncio.Event()
        self.choices: Counter[str] = Counter()
        self._own: dict[str, Callable[[Scope, Send], Awaitable[None]]] = {
            "/livez": self._live,
            "/readyz": self._ready,
            "/health": self._ready,
            "/ping": self._ready,
            "/v1/trserve/groups": self._list,
            "/metrics": self._metrics,
        }

    @property
    def draining(self) -> bool:
        """Whether new requests are refused."""
        return self._drains.is_set()

    def drain(self) -> None:
        """Refuse new requests, and end what ends with the server only."""
        self._drains.set()

    @property
    def open_requests(self) -> int:
        """Requests that are not answered to their end."""
        return sum(group.in_flight for group in self._groups.all)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        # What a group answers has its labels already; what goes out through ``own`` gets ours.
        visit, own = self._desk.open(scope, send)
        kept = [header for header in scope["headers"] if header[0] != _ID]
        scope["headers"] = [*kept, (_ID, visit.request_id)]  # the groups' logs call it the same
        try:
            self._desk.check(visit)
            if (answer := self._own.get(scope["path"])) is None:
                await self._pass_on(visit, receive, send, own)
            elif scope["method"] == "OPTIONS":
                await self._desk.preflight(("GET",), scope, receive, own)
            else:
                await answer(scope, own)
        except RequestError as error:
            await send_error(own, error)
        finally:
            if visit.status is not None:  # what groups answer, they log
                self._desk.close(visit)

    async def _pass_on(self, visit: Visit, receive: Receive, send: Send, own: Send) -> None:
        scope = visit.scope
        if self.draining:
            raise RequestError("the server is shutting down", status=503, retry_after=1)
        if not scope["raw_path"].startswith(b"/"):
            raise RequestError("the request names no path", status=400)
        body = None
        if not self._is_strangers(visit):
            body = await self._desk.bodies.read(visit, receive)
            visit.let_go_of_body()  # the groups count it from here on
        await unless(left(receive), self._answer(scope, body, send, own))

    def _is_strangers(self, visit: Visit) -> bool:
        """Whether it came without the key that others have. What is open to it takes no body."""
        account = visit.account  # none for OPTIONS
        return account is None or (self._asks_keys and account.name == ANYONE)

    async def _answer(self, scope: Scope, body: bytes | None, send: Send, own: Send) -> None:
        path, method = scope["path"], scope["method"]
        reads = method in ("GET", "HEAD") and path != FLUSH  # which GET does as well
        if method == "OPTIONS":
            await self._forward(scope, body, send)
        elif path == CHANGE and method == "POST":
            # Whoever asked may leave; what some groups have done by then the others do as well.
            task = asyncio.create_task(self._change_all(scope, body or b""))
            self._changes.add(task)
            task.add_done_callback(self._changes.discard)
            await send_json(own, *await asyncio.shield(task))
        elif path in EVERYWHERE and not reads:
            answers = await self._ask_all(scope, body)
            await send_json(own, *(_sum if path == ABORT else _worst)(answers))
        elif path.startswith(ONE_OF_THEM):
            await send_json(own, *await self._ask_until_found(scope))
        elif path == WATCH:
            await self._watch(scope, body, send)
        else:
            await self._forward(scope, body, send)

    # -- one of them -------------------------------------------------------------------------

    async def _forward(
        self, scope: Scope, body: bytes | None, send: Send, *, weight: int = 1
    ) -> None:
        """Have one group answer; another if the first cannot be reached."""
        session, prompt = ("", b"") if body is None else affinities(scope, body)
        for _ in self._groups.all:
            group = self._choose(session, prompt)
            group.in_flight += weight
            try:
                if await self._courier.exchange(group, scope, body, send):
                    group.served += 1
                    return
            finally:
                group.in_flight -= weight
        raise self._nobody()

    async def _watch(self, scope: Scope, body: bytes | None, send: Send) -> None:
        """The same with what ends when the drain begins; to a group it is no work."""
        watched = Watched(send)
        forwards = self._forward(scope, body, watched.send, weight=0)
        if not await unless(self._drains.wait(), forwards):
            await watched.end()

    def _choose(self, session: str, prompt: bytes) -> Group:
        best = self._groups.best
        if not best:
            raise self._nobody()
        loads = [group.in_flight if group in best else None for group in self._groups.all]
        choice = self._affinity.choose(loads, session, prompt)
        self.choices[choice.reason] += 1
        return self._groups.all[choice.group]

    def _nobody(self) -> RequestError:
        reasons = "; ".join(f"group {g.index}: {g.detail}" for g in self._groups.all)
        return RequestError(f"no group of workers is ready: {reasons}", status=503, retry_after=1)

    # -- all of them -------------------------------------------------------------------------

    async def _ask_all(self, scope: Scope, body: bytes | None) -> list[_Answer]:
        """Pass it on to every group that takes requests."""
        if not (there := self._groups.there):
            raise self._nobody()
        return await self._ask(there, scope, body)

    async def _ask(
        self, groups: Sequence[Group], scope: Scope, body: bytes | None
    ) -> list[_Answer]:
        asked = await asyncio.gather(*(self._courier.ask(group, scope, body) for group in groups))
        return [(group, *each) for group, each in zip(groups, asked, strict=True)]

    async def _change_all(self, scope: Scope, body: bytes) -> tuple[int, bytes]:
        """The same with a change that is to hold for those that are away, too."""
        async with self._standing.turn:
            answers = await self._ask_all(scope, body)
            if any(status < 400 for _, status, _ in answers):
                self._standing.note(self._courier.request_headers(scope), body)
                for group, status, said in answers:
                    if status >= 500:  # it comes back when it has been told
                        self._groups.lose(
                            group, f"it did not change: {said.decode(errors='replace')}"
                        )
        return _worst(answers)

    async def _ask_until_found(self, scope: Scope) -> tuple[int, bytes]:
        """Whoever answered a request knows it."""
        if not (there := self._groups.there):
            raise self._nobody()
        answer = 404, error_body(RequestError("no group knows this request", status=404))
        for group in there:
            status, said = await self._courier.ask(group, scope, None)
            if status not in (404, 503):
                return status, said
            if status == 503:  # it may be the one that knows
                answer = status, said
        return answer

    # -- our own -----------------------------------------------------------------------------

    async def _live(self, scope: Scope, send: Send) -> None:
        await send_json(send, 200, b'{"status":"ok"}')

    async def _ready(self, scope: Scope, send: Send) -> None:
        ready = [group for group in self._groups.all if group.ready]
        whole = len(ready) == len(self._groups.all)
        serving = bool(ready) and not self.draining
        if serving and asks_deep(scope["query_string"]):
            status, said = _worst(await self._ask(ready, scope, None))
            if status >= 400:
                await send_json(send, status, said)
                return
        body = {
            "status": ("ok" if whole else "degraded") if serving else "unavailable",
            "detail": "; ".join(f"group {g.index}: {g.detail}" for g in self._groups.all),
        }
        await send_json(send, 200 if serving else 503, orjson.dumps(body))

    async def _list(self, scope: Scope, send: Send) -> None:
        groups = [
            {
                "index": group.index,
                "url": group.url,
                "ready": group.ready,
                "takes_requests": group.is_there,
                "detail": group.detail,
                "in_flight": group.in_flight,
                "served": group.served,
                "losses": group.losses,
            }
            for group in self._groups.all
        ]
        body = {"groups": groups, "choices": self.choices, **self.describe()}
        await send_json(send, 200, orjson.dumps(body))

    async def _metrics(self, scope: Scope, send: Send) -> None:
        from trserve.cluster.exposition import exposition

        body, content_type = exposition(self._groups.all, self.choices)
        await send_body(send, 200, body, content_type)


def _worst(answers: Sequence[_Answer]) -> tuple[int, bytes]:
    """The first answer that is no success, else the first."""
    _, status, said = next((each for each in answers if each[1] >= 400), answers[0])
    return status, said


def _sum(answers: Sequence[_Answer]) -> tuple[int, bytes]:
    """How many requests all of them have ended; the first answer that is no success, if any."""
    status, said = _worst(answers)
    if status < 400:
        said = orjson.dumps({"aborted": sum(orjson.loads(each[2])["aborted"] for each in answers)})
    return status, said
