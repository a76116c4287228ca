"""The keys of an endpoint: made, read from where they are kept, and turned into digests.

Only the launcher ever holds a key's text; what it passes on are SHA-256 digests, so that neither
a plan nor a log can give one away. Knows no HTTP.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import string
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from trserve.errors import ConfigError

API_VARIABLE: Final = "TRSERVE_API_KEY"
ADMIN_VARIABLE: Final = "TRSERVE_ADMIN_KEY"
_ALLOWED: Final = frozenset(string.ascii_letters + string.digits + string.punctuation)


def new_key() -> str:
    """A fresh key of 256 random bits."""
    return "sk-" + secrets.token_urlsafe(32)


def digest(key: str | bytes) -> str:
    """What is kept of a key."""
    return hashlib.sha256(key.encode() if isinstance(key, str) else key).hexdigest()


def read_api_keys(given: Sequence[str]) -> list[str]:
    """The keys of ``--api-key``, else those of the environment, which then forgets them.

    Raises ConfigError, which shows no key.
    """
    kept = os.environ.pop(API_VARIABLE, None)
    if given:
        keys = [key for each in given for key in _expand(each, "--api-key")]
        return _checked(keys, "--api-key")
    if kept is None:
        return []
    return _checked([key for each in kept.split(",") for key in _expand(each, API_VARIABLE)])


def read_admin_key(given: str, api_keys: Iterable[str]) -> str | None:
    """The key of ``--admin-key``, else that of the environment; None for none.

    Raises ConfigError, which shows no key.
    """
    kept = os.environ.pop(ADMIN_VARIABLE, None)
    source = "--admin-key" if given else ADMIN_VARIABLE
    if not given and kept is None:
        return None
    (key, *others) = _checked(_expand(given or kept or "", source), source)
    if others:
        raise ConfigError(f"{source}: names several keys; there is one")
    if key in api_keys:
        raise ConfigError(
            f"{source}: is one of the API keys, so that every client could change the server; "
            "take another (`trserve keys new`)"
        )
    return key


def check_lines(keys: Sequence[str], source: str) -> None:
    """Raises ConfigError for a key that a line of a file of keys does not hold as it is."""
    for number, key in enumerate(keys, 1):
        if key.startswith(("#", "@")):
            raise ConfigError(
                f"{source}: key {number} begins with {key[0]}, and --executor ray gives replicas "
                "their keys in files, where # begins a comment and @ a file's name; take another "
                "(`trserve keys new`)"
            )


def _expand(text: str, source: str) -> list[str]:
    """``text``, or the lines of the file that it names; blank lines and comments are left out."""
    text = text.strip()
    if not text.startswith("@"):
        return [text]
    path = Path(text[1:]).expanduser()
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is no text"
        raise ConfigError(f"{source} @{path}: {reason}; give a file of keys, one a line") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"{source} @{path}: holds no key; `trserve keys new` makes one")
    return keys


def _checked(keys: list[str], source: str = API_VARIABLE) -> list[str]:
    for key in keys:
        if not key:
            raise ConfigError(
                f"{source}: an empty key would let anyone in; `trserve keys new` makes one"
            )
        if not set(key) <= _ALLOWED:
            raise ConfigError(
                f"{source}: a key has letters, digits and punctuation of ASCII only, which is what "
                "a header can carry"
            )
    return keys
