"""What of a request says which group has seen its like: its session, and its prompt.

Knows the fields of the APIs that name them; no groups, and nothing of what becomes of it.
"""

from __future__ import annotations

from typing import Final

import orjson

from trserve.gateway.replies import Scope

SESSION_HEADERS: Final = (b"x-session-affinity", b"x-session-id")
SESSION_FIELDS: Final = ("session_id", "prompt_cache_key", "user")
PROMPT_FIELDS: Final = ("messages", "prompt", "input_ids", "text")


def affinities(scope: Scope, body: bytes) -> tuple[str, bytes]:
    """The session of a request and the bytes of its prompt, both empty where there is none."""
    headers = dict(scope["headers"])
    session = next(
        (headers[name].decode("latin-1") for name in SESSION_HEADERS if name in headers), ""
    )
    try:
        fields = orjson.loads(body) if body else None
    except orjson.JSONDecodeError:  # the group's to refuse
        fields = None
    if not isinstance(fields, dict):
        return session, b""
    named = (fields.get(name) for name in SESSION_FIELDS)
    session = session or next((str(each) for each in named if _is_name(each)), "")
    prompt = next((fields[name] for name in PROMPT_FIELDS if fields.get(name)), "")
    try:
        return session, orjson.dumps(prompt)
    except orjson.JSONEncodeError:  # nested deeper than it writes: the group's to refuse
        return session, b""


def _is_name(value: object) -> bool:
    return bool(value) and isinstance(value, str | int)
