"""How a field of the configuration tree says that it is a flag. Knows no flag and no click."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import Any


def option(
    default: Any,
    help_text: str,
    *,
    also: tuple[str, ...] = (),
    off: tuple[str, ...] = (),
    parse: Callable[[str], Any] | None = None,
    choices: tuple[str, ...] = (),
    multiple: bool = False,
    metavar: str | None = None,
) -> Any:
    """A field that is a flag.

    Args:
        also: further spellings (those of vLLM and SGLang, say).
        off: further spellings that turn a switch off.
        parse: turns the flag's text into the value; raises ValueError with the reason.
        choices: the values that are allowed.
        multiple: the flag may be repeated; ``parse`` is given each text.
        metavar: what the help shows for the value.
    """
    metadata = {
        "help": help_text,
        "also": also,
        "off": off,
        "parse": parse,
        "choices": choices,
        "multiple": multiple,
        "metavar": metavar,
    }
    return field(default=default, metadata=metadata)
