"""What is asked of the settings where a model is at a server that takes ids. Knows no calls."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from trserve.errors import ConfigError
from trserve.router_lib.registry import describe

log = logging.getLogger(__name__)
VISIT_TOKENS: Final = "visit_tokens"
"""The parameter of routers whose visits end by themselves."""


def check_router(name: str) -> None:
    """ConfigError where the router ``name`` would have to be asked at a server that has none."""
    entry = describe(name)
    if entry is None:
        log.warning("--router %s is not asked at an openai: server; visits end by themselves", name)
        return
    if name != "none" and all(each.name != VISIT_TOKENS for each in entry.parameters):
        raise ConfigError(
            f"--router {name}: decides at the model it hands to, too, which no openai: server lets "
            "it; use confidence, citer, r2r, co-llm, entropy, top-prob or margin, or a trserve "
            "there (--edge-listen)"
        )


def read_key(path: str) -> str:
    """The first line of the file ``path``, the server's API key. ConfigError without one."""
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--edge-keys {path}: cannot be read: {error}") from None
    if len(lines) != 1:
        raise ConfigError(f"--edge-keys {path}: an openai: server's API key is one line of text")
    return lines[0]
