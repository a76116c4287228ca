"""The web page at ``/``: static files, their headers and nothing else.

The files lie in ``page/`` beside this module, are read once and come from this origin alone. Knows
no keys and no requests: the page asks the API like every other client.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from trserve.gateway.replies import Handler, Receive, Scope, Send

FOLDER: Final = Path(__file__).with_name("page")
_INDEX: Final = "index.html"
_TYPES: Final = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}
CONTENT_POLICY: Final = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    b"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS: Final = [
    # Revalidated each time: a page of the last version must not talk to this one.
    (b"cache-control", b"no-cache"),
    (b"content-security-policy", CONTENT_POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
]


def _path(name: str) -> str:
    return "/" if name == _INDEX else f"/page/{name}"


PATHS: Final = frozenset(_path(file.name) for file in FOLDER.iterdir() if file.suffix in _TYPES)
"""What is answered without a key while the page is on."""


class PageFile(NamedTuple):
    """One file as it is sent; ``tag`` is its entity tag, quotes included."""

    body: bytes
    content_type: bytes
    tag: bytes


def page_routes() -> Mapping[str, dict[str, Handler]]:
    """The routes by path and method."""
    routes: dict[str, dict[str, Handler]] = {}
    for file in FOLDER.iterdir():
        if file.suffix in _TYPES:
            routes[_path(file.name)] = {"GET": partial(_send, _read(file))}
    return routes


def _read(file: Path) -> PageFile:
    body = file.read_bytes()
    digest = hashlib.sha256(body).hexdigest()[:32].encode()
    return PageFile(body, _TYPES[file.suffix], b'"' + digest + b'"')


async def _send(file: PageFile, scope: Scope, receive: Receive, send: Send) -> None:
    """The file, or 304 where the client has it."""
    has = any(
        name == b"if-none-match" and (value.strip() == b"*" or file.tag in value)
        for name, value in scope["headers"]
    )
    headers = [(b"etag", file.tag), *_HEADERS]
    if not has:
        size = str(len(file.body)).encode()
        headers += [(b"content-type", file.content_type), (b"content-length", size)]
    await send({"type": "http.response.start", "status": 304 if has else 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"" if has else file.body})
