"""One HTTP request from its first header to its last byte: who asked, and what came of it.

Kept for the log and for the limits of its key. Knows no routes and no text.
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any, Final

from trserve.gateway.access import Account
from trserve.gateway.cors import Header
from trserve.gateway.dispatcher import Job
from trserve.gateway.generation import Generation
from trserve.gateway.metrics import Times
from trserve.gateway.random_bits import new_hex
from trserve.gateway.requests import GenerationRequest

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]

CLIENT_LEFT: Final = 499
_LABEL: Final = re.compile(rb"[\x21-\x7e]{1,128}")


def _nothing() -> None:
    """No body was read."""


class Visit:
    """One request.

    Attributes:
        body_bytes: how long its body is by its headers; 0 where they say nothing.
        held_bytes: what its body takes now, of what the bodies of all may take.
        request_id: the client's own label if it is one, else a new id; never a key to anything.
        labels: headers of its response, beside those that say what is in it.
        account: whose it is, once that is known.
        status: of the response; None until it has begun.
        begun_s, ended_s: when the response began and when all was over (``time.monotonic``).
        prompt_tokens: of all its prompts, each once.
        usages: of its answers, as responses carry them.
        reasons: why its answers ended.
        times: when they came to what.
        requests, response_id: what it asked for, once that was understood.
        let_go_of_body: to be called when the body is no more, or has become jobs; twice is once.
    """

    def __init__(self, scope: MutableMapping[str, Any]) -> None:
        self.scope = scope
        self.authorizations: list[bytes] = []
        self.origin: bytes | None = None
        self.body_bytes = self.held_bytes = 0
        label: bytes | None = None
        for name, value in scope["headers"]:
            if name == b"authorization":
                self.authorizations.append(value)
            elif name == b"content-length":
                self.body_bytes = int(value)  # the parser has seen that it is a number
            elif name == b"origin":
                self.origin = value
            elif name == b"x-request-id" and label is None and _LABEL.fullmatch(value):
                label = value
        self.request_id = label or new_hex().encode()
        self.labels: Sequence[Header] = ()
        self.account: Account | None = None
        self.status: int | None = None
        self.arrived_s = time.monotonic()
        self.begun_s = self.ended_s = 0.0
        self.prompt_tokens = 0
        self.usages: list[dict[str, Any]] = []
        self.reasons: list[str] = []
        self.times: list[Times | None] = []
        self.requests: Sequence[GenerationRequest] = ()
        self.response_id = ""
        self._is_in = False
        self.let_go_of_body: Callable[[], None] = _nothing

    def sender(self, send: Send, headers: Sequence[Header]) -> Send:
        """``send`` with the request's id and ``headers`` on the response."""
        self.labels = [(b"x-request-id", self.request_id), *headers]

        async def labelled(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.begin(message["status"])
                message["headers"] = [*message["headers"], *self.labels]
            await send(message)

        return labelled

    def begin(self, status: int) -> None:
        """Its response begins with ``status``."""
        self.status = self.status or status
        self.begun_s = time.monotonic()

    def understood(self, requests: Sequence[GenerationRequest], response_id: str) -> None:
        """It asks for answers, which go out in the response of this id."""
        self.requests, self.response_id = requests, response_id

    def enter(self, jobs: Sequence[Job]) -> None:
        """Its prompts are known: RequestError (429) where its key may not have more now."""
        self.let_go_of_body()
        prompts = {id(job.prompt_ids): len(job.prompt_ids) for job in jobs}
        tokens = sum(prompts.values())
        if self.account is not None:
            self.account.enter(tokens)
            self._is_in = True
        self.prompt_tokens += tokens

    def leave(self, generations: Sequence[Generation]) -> None:
        """Its answers have ended, however they did."""
        for generation in generations:
            self.usages.append(generation.usage())
            self.reasons.append(generation.end_reason or "abort")
            self.times.append(generation.times)
        if self._is_in and self.account is not None:
            self._is_in = False
            tokens = sum([usage["completion_tokens"] for usage in self.usages])
            # What got no answer took nothing of its key's tokens.
            self.account.leave(tokens if generations else -self.prompt_tokens)
