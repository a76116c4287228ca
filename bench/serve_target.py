"""Whom to ask, and how: the endpoint's address, its model, its key, and the bytes of a request.

Knows no load and no answers.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

import orjson

from bench.closed_loop import Counts
from bench.endpoint import SCRAPE_TIMEOUT_S, counts_of
from bench.http_client import HttpError, encode
from bench.serve_asks import Ask
from bench.serve_stream import EventConnection

CHAT: Final = "chat"
COMPLETIONS: Final = "completions"
_PATHS: Final = {CHAT: "/chat/completions", COMPLETIONS: "/completions"}
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
_TEXT: Final = (
    "the of and to in is that for it as was with be by on not he at are this but from or have an"
    " they which one you were all her she there would their we him been has when who will no more"
    " if out so up said what its about than into them can only other time new some could these two"
)
_WORDS: Final = _TEXT.split()
"""Words that most tokenizers have as one token each."""


@dataclass(frozen=True)
class Target:
    """An OpenAI-compatible endpoint.

    Attributes:
        base: what stands before ``/chat/completions``, as ``/v1``.
        key: sent as a bearer token; None sends none.
        extra: members of every request's body, over those that are set here; None leaves one out.
        every_usage: have the usage in every event.
    """

    host: str
    port: int
    base: str
    tls: ssl.SSLContext | None = None
    model: str | None = None
    endpoint: str = COMPLETIONS
    key: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    every_usage: bool = False

    async def connect(self) -> EventConnection:
        return await EventConnection.open(self.host, self.port, self.tls)

    def request(self, ask: Ask) -> bytes:
        """A request for ``ask``, as a stream that ends with its usage."""
        return self._encode("POST", self.base + _PATHS[self.endpoint], orjson.dumps(self.body(ask)))

    def body(self, ask: Ask) -> dict[str, Any]:
        """The JSON of that request.

        A chat has no token ids: each becomes a word, so that prompts that begin alike still do.
        """
        options = {"include_usage": True}
        if self.every_usage:
            options["continuous_usage_stats"] = True
        made: dict[str, Any] = {"model": self.model, "stream": True, "stream_options": options}
        if self.endpoint == CHAT:
            made["messages"], limit = _messages(ask.prompt), "max_completion_tokens"
        else:
            made["prompt"], limit = ask.prompt, "max_tokens"
        made |= {limit: ask.max_tokens, "temperature": 0}
        if ask.ignore_eos:
            made["ignore_eos"] = True
        made |= self.extra
        return {name: value for name, value in made.items() if value is not None}

    async def first_model(self) -> str:
        """The first that ``/v1/models`` lists; SystemExit where there is none."""
        raw = await self._get(f"{self.base}/models")
        try:
            return str(orjson.loads(raw)["data"][0]["id"])
        except (ValueError, KeyError, IndexError, TypeError):
            raise SystemExit(f"{self.base}/models lists no model: give --model") from None

    async def counts(self, models: Sequence[str]) -> Counts | None:
        """What trserve's metrics say; None where the server has no such page."""
        try:
            return counts_of(await self._get("/metrics"), models, 0.0)
        except (HttpError, OSError, TimeoutError, KeyError):
            return None

    async def _get(self, path: str) -> bytes:
        connection = await self.connect()
        try:
            return await connection.exchange(self._encode("GET", path), SCRAPE_TIMEOUT_S)
        finally:
            connection.close()

    def _encode(self, method: str, path: str, body: bytes = b"") -> bytes:
        headers = {"content-type": "application/json", "accept": "text/event-stream, */*"}
        if self.key is not None:
            headers["authorization"] = f"Bearer {self.key}"
        return encode(method, path, body, headers, host=f"{self.host}:{self.port}")


def read_url(url: str) -> tuple[str, int, str, ssl.SSLContext | None]:
    """Host, port, base path and TLS of ``--url``; SystemExit where it is none."""
    parts = urlsplit(url)
    if parts.scheme not in _DEFAULT_PORTS or not parts.hostname:
        raise SystemExit(f"--url {url}: write http://HOST:PORT or https://HOST, /v1 may follow")
    base = parts.path.rstrip("/") or "/v1"
    tls = ssl.create_default_context() if parts.scheme == "https" else None
    return parts.hostname, parts.port or _DEFAULT_PORTS[parts.scheme], base, tls


def read_key(variable: str) -> str | None:
    """The key in that environment variable; one with a line break in it is refused."""
    key = os.environ.get(variable, "").strip()
    if any(not "!" <= letter <= "~" for letter in key):
        raise SystemExit(f"{variable}: a key has no spaces, line breaks or letters beyond ASCII")
    return key or None


def _messages(prompt: Any) -> list[dict[str, Any]]:
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if prompt and isinstance(prompt[0], dict):
        return list(prompt)
    text = " ".join(_WORDS[token % len(_WORDS)] for token in prompt)
    return [{"role": "user", "content": text}]
