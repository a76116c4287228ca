"""The gateway's log: one line for each request that is over, as text or as JSON.

Sizes, times and who wrote; a prompt, an answer and a key are never in it. Whoever asks a probe,
scrapes metrics or opens the web page leaves no line.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final

import orjson

from trserve.gateway.access import METRICS, PROBES
from trserve.gateway.log_stream import LogStream
from trserve.gateway.page_routes import PATHS
from trserve.gateway.visit import CLIENT_LEFT, Visit

_LONGEST_TEXT: Final = 200
_PREFIX: Final = "trserve gateway: "


def _write(line: str) -> None:
    # Whoever reads the log may be gone, or the descriptor closed: a request that was answered must
    # not end as an error for it, and there is nowhere left to say so.
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(line + "\n")


class JsonFormatter(logging.Formatter):
    """Every other line of the gateway, as JSON too."""

    def format(self, record: logging.LogRecord) -> str:
        """One JSON object."""
        entry = {
            "ts": _timestamp(record.created),
            "level": record.levelname.lower(),
            "process": "gateway",
            "event": "message",
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["trace"] = self.formatException(record.exc_info)
        return orjson.dumps(entry).decode()


def use_format(name: str) -> None:
    """Have this process log as ``text`` or ``json``."""
    if name == "json":
        for handler in logging.getLogger().handlers:
            handler.setFormatter(JsonFormatter())
        if isinstance(sys.stderr, LogStream):
            sys.stderr.note = _left_out


def _left_out(lines: int) -> str:
    head = {"ts": _timestamp(time.time()), "level": "warning", "process": "gateway"}
    return orjson.dumps({**head, "event": "left_out", "lines": lines}).decode() + "\n"


class Journal:
    """Writes a line for each visit.

    Args:
        wanted: whether requests are logged at all.
        as_json: one JSON object a line instead of text.
        write: takes a line without its end.
    """

    def __init__(
        self, *, wanted: bool = False, as_json: bool = False, write: Callable[[str], None] = _write
    ) -> None:
        self._wanted = wanted
        self._encode = _json if as_json else _text
        self._write = write

    def close(self, visit: Visit) -> None:
        """The visit is over."""
        if not self._wanted or visit.scope["path"] in _QUIET:
            return
        visit.ended_s = time.monotonic()
        self._write(self._encode(_entry(visit)))


_QUIET: Final = PROBES | PATHS | {METRICS}


def _entry(visit: Visit) -> dict[str, Any]:
    """What is told of a visit, in the order of a line."""
    scope = visit.scope
    client = scope.get("client")
    entry: dict[str, Any] = {
        "method": scope["method"],
        "path": scope["path"][:_LONGEST_TEXT],
        "status": CLIENT_LEFT if visit.status is None else visit.status,
        "request_id": visit.request_id.decode(),
        "key": visit.account.name if visit.account is not None else None,
        "client": client[0] if client else None,
        "duration_ms": round((visit.ended_s - visit.arrived_s) * 1e3, 2),
    }
    if visit.usages:
        entry |= _answers(visit)
    return entry


def _answers(visit: Visit) -> dict[str, Any]:
    own = [usage["trserve"] for usage in visit.usages]
    tokens: Counter[str] = Counter()
    for each in own:
        tokens.update(each["tokens"])
    found: dict[str, Any] = {
        "prompt_tokens": visit.prompt_tokens,
        "completion_tokens": sum(usage["completion_tokens"] for usage in visit.usages),
        "tokens": dict(tokens),
        "handoffs": sum(each["handoffs"] for each in own),
        "pending_ms": round(sum(each["pending_ms"] for each in own), 2),
        "finish_reason": ",".join(dict.fromkeys(visit.reasons)),
    }
    if visit.status is not None:
        found["ttfb_ms"] = round((visit.begun_s - visit.arrived_s) * 1e3, 2)
    return found


def _timestamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def _json(entry: Mapping[str, Any]) -> str:
    head = {"ts": _timestamp(time.time()), "level": "info", "process": "gateway"}
    return orjson.dumps({**head, "event": "request", **entry}).decode()


def _text(entry: Mapping[str, Any]) -> str:
    method, path, status, *_ = entry.values()
    path = "".join(each if each.isprintable() and each != " " else "?" for each in path)
    shown = [f"{name}={_plain(value)}" for name, value in list(entry.items())[3:]]
    return f"{_PREFIX}{method} {path} {status} {' '.join(shown)}"


def _plain(value: object) -> str:
    if isinstance(value, Mapping):
        return ",".join(f"{name}:{count}" for name, count in value.items())
    return "-" if value is None else str(value)
