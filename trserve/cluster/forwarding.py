"""One endpoint for several groups: a request goes to one of them, its answer comes back as it is.

A request whose group cannot be reached goes to another, as nothing of it was answered; one whose
answer breaks off in the middle ends with an error that says so, as its other tokens are with the
group. Knows no models, no tokens and no supervisors.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import aiohttp
import orjson
from yarl import URL

from trserve.cluster.affinity import Affinity
from trserve.cluster.asked import affinities
from trserve.cluster.groups import Group, Groups
from trserve.cluster.standing import PATH as CHANGE
from trserve.cluster.standing import StandingChange
from trserve.endpoint_plan import EndpointPlan
from trserve.errors import RequestError
from trserve.gateway.access import ADMIN_PATHS, Access
from trserve.gateway.replies import Receive, Scope, Send, read_body, send_error, send_json
from trserve.gateway.responses import error_body

log = logging.getLogger(__name__)
FLUSH: Final = "/flush_cache"
EVERYWHERE: Final = frozenset({CHANGE, FLUSH, "/abort_request"})
"""What one asks of the server means every group of it."""

ONE_OF_THEM: Final = "/v1/trserve/requests/"
_HOP_BY_HOP: Final = frozenset(
    {b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer", b"upgrade", b"host"}
    | {b"content-length", b"proxy-authorization", b"expect"}
)
_EVENTS: Final = b"text/event-stream"
_EVENT_END: Final = b"\n\n"
_OUR_LIBRARYS: Final = ("accept", "accept-encoding", "content-type", "user-agent")
"""Headers that it would add where the client sent none."""
ANSWER_S: Final = 30.0
"""How long a group may take for what concerns the server, not the models."""

_Headers = list[tuple[bytes, bytes]]
_Answer = tuple[Group, int, bytes]


ANYBODYS: Final = EndpointPlan()


class Forwarding:
    """The ASGI callable.

    Args:
        key: what the groups ask of whoever speaks to them, in the place of the client's own; None
            where the client's key is theirs to check.
        endpoint: who may see what this process answers by itself, and who may administer.

    Attributes:
        describe: gives more members for ``/v1/trserve/groups``.
        draining: whether new requests are refused.
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
        self._access = Access(endpoint)
        self._groups = groups
        self._affinity = affinity
        self._session = session
        self._key = key
        self._standing = StandingChange(session)
        self._changes: set[asyncio.Task[tuple[int, bytes]]] = set()
        groups.on_return = self._standing.bring
        self.describe: Callable[[], dict[str, Any]] = dict
        self.draining = False
        self.choices: Counter[str] = Counter()
        self._own: dict[str, Callable[[Send], Awaitable[None]]] = {
            "/livez": self._live,
            "/readyz": self._ready,
            "/health": self._ready,
            "/ping": self._ready,
            "/v1/trserve/groups": self._list,
            "/metrics": self._metrics,
        }

    @property
    def open_requests(self) -> int:
        """Requests that are not answered to their end."""
        return sum(group.in_flight for group in self._groups.all)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        path = scope["path"]
        own = self._own.get(path)
        try:
            # Who may not, keeps nobody waiting; with OPTIONS a browser sends no key.
            if own is not None or (path in ADMIN_PATHS and scope["method"] != "OPTIONS"):
                sent = [value for name, value in scope["headers"] if name == b"authorization"]
                self._access.check(path, scope["query_string"], sent)
            if own is not None:
                await own(send)
                return
            if self.draining:
                raise RequestError("the server is shutting down", status=503, retry_after=1)
            if not scope["raw_path"].startswith(b"/"):
                raise RequestError("the request names no path", status=400)
            body = await read_body(receive)
            await _until_gone(receive, self._answer(scope, body, send))
        except RequestError as error:
            await send_error(send, error)

    async def _answer(self, scope: Scope, body: bytes, send: Send) -> None:
        reads = scope["method"] == "GET" and scope["path"] != FLUSH  # which GET does as well
        if scope["path"] == CHANGE and scope["method"] == "POST":
            # Whoever asked may leave; what some groups have done by then the others do as well.
            task = asyncio.create_task(self._change_all(scope, body))
            self._changes.add(task)
            task.add_done_callback(self._changes.discard)
            await send_json(send, *await asyncio.shield(task))
        elif scope["path"] in EVERYWHERE and not reads:
            await send_json(send, *_worst(await self._ask_all(scope, body)))
        elif scope["path"].startswith(ONE_OF_THEM):
            await self._ask_until_found(scope, send)
        else:
            await self._forward(scope, body, send)

    # -- one of them -------------------------------------------------------------------------

    async def _forward(self, scope: Scope, body: bytes, send: Send) -> None:
        """Have one group answer; another if the first cannot be reached."""
        session, prompt = affinities(scope, body)
        for _ in self._groups.all:
            group = self._choose(session, prompt)
            group.in_flight += 1
            try:
                if await self._exchange(group, scope, body, send):
                    group.served += 1
                    return
            finally:
                group.in_flight -= 1
        raise self._nobody()

    def _choose(self, session: str, prompt: bytes) -> Group:
        loads = [group.load for group in self._groups.all]
        if not any(load is not None for load in loads):
            raise self._nobody()
        choice = self._affinity.choose(loads, session, prompt)
        self.choices[choice.reason] += 1
        return self._groups.all[choice.group]

    def _nobody(self) -> RequestError:
        reasons = "; ".join(f"group {g.index}: {g.detail}" for g in self._groups.all)
        return RequestError(f"no group of workers is ready: {reasons}", status=503, retry_after=1)

    async def _exchange(self, group: Group, scope: Scope, body: bytes, send: Send) -> bool:
        """Pass the request on and the answer back; False if the group did not begin to answer."""
        begun, events, last = False, False, _EVENT_END
        try:
            async with self._request(group, scope, body) as reply:
                headers = _answer_headers(reply, group)
                events = any(name == b"content-type" and _EVENTS in v for name, v in headers)
                start = {"type": "http.response.start", "status": reply.status, "headers": headers}
                if scope["http_version"] == "1.0" and reply.content_length is None:
                    await _send_whole(send, start, await reply.read())  # it knows no chunks
                    return True
                begun = True
                await send(start)
                async for piece in reply.content.iter_any():
                    last = (last + piece)[-len(_EVENT_END) :]
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        except (aiohttp.ClientError, TimeoutError) as error:
            self._groups.lose(group, repr(error))
            if not begun:
                return False
            cut = b"" if last == _EVENT_END else _EVENT_END  # what was cut off is an event too
            await _break_off(send, group, cut, events=events)
        return True

    def _request(self, group: Group, scope: Scope, body: bytes) -> Any:
        target = scope["raw_path"] + b"?" * bool(scope["query_string"]) + scope["query_string"]
        return self._session.request(
            scope["method"],
            URL(group.url + target.decode("ascii"), encoded=True),
            data=body or None,
            headers=self._request_headers(scope),
            skip_auto_headers=_OUR_LIBRARYS,
            allow_redirects=False,
        )

    def _request_headers(self, scope: Scope) -> list[tuple[str, str]]:
        # Who administers has a key of their own, which the groups check as well.
        ours = self._key is not None and scope["path"] not in ADMIN_PATHS
        kept = [
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in scope["headers"]
            if name not in _HOP_BY_HOP and not (ours and name == b"authorization")
        ]
        if ours:
            kept.append(("authorization", f"Bearer {self._key}"))
        return kept

    # -- all of them -------------------------------------------------------------------------

    async def _ask_all(self, scope: Scope, body: bytes) -> list[_Answer]:
        """Pass it on to every group that is ready."""
        ready = [group for group in self._groups.all if group.ready]
        if not ready:
            raise self._nobody()
        whole = await asyncio.gather(*(self._whole(group, scope, body) for group in ready))
        return [(group, *each) for group, each in zip(ready, whole, strict=True)]

    async def _change_all(self, scope: Scope, body: bytes) -> tuple[int, bytes]:
        """The same with a change that is to hold for those that are away, too."""
        async with self._standing.turn:
            answers = await self._ask_all(scope, body)
            if any(status < 400 for _, status, _ in answers):
                self._standing.note(self._request_headers(scope), body)
                for group, status, said in answers:
                    if status >= 500:  # it comes back when it has been told
                        self._groups.lose(
                            group, f"it did not change: {said.decode(errors='replace')}"
                        )
        return _worst(answers)

    async def _ask_until_found(self, scope: Scope, send: Send) -> None:
        """Whoever answered a request knows it."""
        answer = 404, error_body(RequestError("no group knows this request", status=404))
        for group in self._groups.all:
            if group.ready and (answer := await self._whole(group, scope, b""))[0] != 404:
                break
        await send_json(send, *answer)

    async def _whole(self, group: Group, scope: Scope, body: bytes) -> tuple[int, bytes]:
        try:
            async with asyncio.timeout(ANSWER_S), self._request(group, scope, body) as reply:
                return reply.status, await reply.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            self._groups.lose(group, repr(error))
            what = RequestError(f"group {group.index} is away: {error!r}", status=503)
            return what.status, error_body(what)

    # -- our own -----------------------------------------------------------------------------

    async def _live(self, send: Send) -> None:
        await send_json(send, 200, b'{"status":"ok"}')

    async def _ready(self, send: Send) -> None:
        ready = [group for group in self._groups.all if group.ready]
        whole = len(ready) == len(self._groups.all)
        serving = bool(ready) and not self.draining
        body = {
            "status": ("ok" if whole else "degraded") if serving else "unavailable",
            "detail": "; ".join(f"group {g.index}: {g.detail}" for g in self._groups.all),
        }
        await send_json(send, 200 if serving else 503, orjson.dumps(body))

    async def _list(self, send: Send) -> None:
        groups = [
            {
                "index": group.index,
                "url": group.url,
                "ready": group.ready,
                "detail": group.detail,
                "in_flight": group.in_flight,
                "served": group.served,
                "losses": group.losses,
            }
            for group in self._groups.all
        ]
        body = {"groups": groups, "choices": self.choices, **self.describe()}
        await send_json(send, 200, orjson.dumps(body))

    async def _metrics(self, send: Send) -> None:
        from trserve.cluster.exposition import exposition

        body, content_type = exposition(self._groups.all, self.choices)
        headers = [(b"content-type", content_type), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def _worst(answers: Sequence[_Answer]) -> tuple[int, bytes]:
    """The first answer that is no success, else the first."""
    _, status, said = next((each for each in answers if each[1] >= 400), answers[0])
    return status, said


async def _until_gone(receive: Receive, work: Awaitable[None]) -> None:
    """Do ``work`` unless the client leaves before it is done: then it is cancelled."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(receive())
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


def _answer_headers(reply: aiohttp.ClientResponse, group: Group) -> _Headers:
    kept = [(k.lower(), v) for k, v in reply.raw_headers if k.lower() not in _HOP_BY_HOP]
    if (length := reply.headers.get("content-length")) is not None:
        kept.append((b"content-length", length.encode()))
    return [*kept, (b"x-trserve-group", str(group.index).encode())]


async def _send_whole(send: Send, start: dict[str, Any], body: bytes) -> None:
    headers = [*start["headers"], (b"content-length", b"%d" % len(body))]
    await send({**start, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _break_off(send: Send, group: Group, cut: bytes, *, events: bool) -> None:
    """End an answer that its group did not: with an error in a stream, else with the connection.

    ``cut`` ends what is left of an event.
    """
    log.error("group %d went away in the middle of an answer", group.index)
    if not events:
        raise ConnectionAbortedError(f"group {group.index} went away in the middle of an answer")
    error = RequestError(
        f"group {group.index} went away in the middle of this answer; ask again", status=503
    )
    frame = cut + b"data: " + error_body(error) + _EVENT_END
    await send({"type": "http.response.body", "body": frame, "more_body": True})
    await send({"type": "http.response.body", "body": b""})
