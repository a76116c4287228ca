"""The prompts that a router is trained on, from a file. Knows no models and no tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from trserve.errors import ConfigError

Content = str | Sequence[Mapping[str, Any]]
"""A text as it is, or the messages of a chat."""


class TrainingPrompt(msgspec.Struct, frozen=True):
    """One prompt; ``answer`` is the reference that roll-outs are judged by, if there is one."""

    content: Content
    answer: str | None = None


class _Line(msgspec.Struct, forbid_unknown_fields=False):
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    answer: str | None = None


def read_prompts(path: Path) -> list[TrainingPrompt]:
    """The prompts of ``path``.

    Args:
        path: ``*.jsonl``, an object a line with ``messages`` (a chat) or ``prompt`` (a text that
            is used as it is), and optionally ``answer``; any other file: a user's message a line.

    Raises:
        ConfigError: it cannot be read, or holds none; the message names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {path}: cannot be read: {error}") from None
    read = _from_json if path.suffix == ".jsonl" else _from_text
    found = [read(path, n, line) for n, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise ConfigError(f"--prompts {path}: holds no prompts")
    return found


def _from_text(path: Path, number: int, line: str) -> TrainingPrompt:
    return TrainingPrompt([{"role": "user", "content": line}])


def _from_json(path: Path, number: int, line: str) -> TrainingPrompt:
    try:
        told = msgspec.json.decode(line, type=_Line)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise ConfigError(f"--prompts {path}, line {number}: {error}") from None
    if (told.prompt is None) == (told.messages is None):
        raise ConfigError(f'--prompts {path}, line {number}: needs either "messages" or "prompt"')
    content: Content | None = told.prompt if told.messages is None else told.messages
    assert content is not None
    if not content:
        raise ConfigError(f"--prompts {path}, line {number}: is empty; give it text or messages")
    return TrainingPrompt(content, told.answer)
