"""Web pages of other origins: which may call, and what a browser asks beforehand.

No credentials are ever allowed: a key is sent by the page itself, never by the browser.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

Header = tuple[bytes, bytes]
ANY: Final = "*"
_EXPOSED: Final = (
    b"access-control-expose-headers",
    b"x-request-id, x-trserve-router, x-trserve-version, retry-after",
)
_VARY: Final = (b"vary", b"origin")
_MAX_AGE_S: Final = b"600"


class Cors:
    """The origins that may call.

    Args:
        origins: ``https://host``, lower case; ``*`` for any.
    """

    def __init__(self, origins: Sequence[str]) -> None:
        self._any = ANY in origins
        self._origins = frozenset(origin.encode() for origin in origins)

    def headers(self, origin: bytes | None) -> list[Header]:
        """What a response to a page of ``origin`` carries; nothing where it may not read it."""
        if origin is None:
            return []
        if self._any:
            return [(b"access-control-allow-origin", b"*"), _EXPOSED]
        if origin.lower() in self._origins:
            return [(b"access-control-allow-origin", origin), _VARY, _EXPOSED]
        return [_VARY]

    @staticmethod
    def preflight(methods: bytes, wanted: bytes | None) -> list[Header]:
        """What the answer to OPTIONS says besides: the methods, and the headers ``wanted``."""
        return [
            (b"access-control-allow-methods", methods),
            (b"access-control-allow-headers", wanted or b"authorization, content-type"),
            (b"access-control-max-age", _MAX_AGE_S),
        ]
