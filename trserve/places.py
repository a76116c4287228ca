"""Where the models of a server are: here, at another host, or at the other side of our edge port.

``NAME`` is here; ``NAME@HOST:PORT`` is served by another trserve, ``NAME@openai:URL`` by any server
that takes token ids, ``NAME@edge`` stands for a model of whoever dials ``--edge-listen``. Knows
spellings; opens no connection.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from trserve.errors import ConfigError

EDGE: Final = "edge"
OPENAI: Final = "openai:"
PLACEHOLDER: Final = f"{EDGE}@{EDGE}"
_HOST_PORT: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]/:@,\s]+):(\d{1,5})")
_MAX_PORT: Final = 65535


class Place(NamedTuple):
    """One of ``--models``: its name, and where it is; ``remote`` is empty for one that is here."""

    name: str
    remote: str = ""

    @property
    def is_placeholder(self) -> bool:
        """Whether it stands for a model of whoever dials our edge port."""
        return self.remote == EDGE


def split_place(text: str) -> Place:
    """``NAME@WHERE``; what is behind the last ``@`` of a path or hub id is part of the name.

    Raises ConfigError for an address that is none.
    """
    name, at, where = text.partition(f"@{OPENAI}")
    if at:
        if not where.startswith(("http://", "https://")) or not name:
            raise ConfigError(f"--models {text}: write NAME@openai:http://HOST:PORT/v1")
        return Place(name, OPENAI + where)
    name, at, where = text.rpartition("@")
    if not at or not name or "/" in where:
        return Place(text)
    if where == EDGE:
        return Place(name, EDGE)
    check_address("--models", where)
    return Place(name, where)


def check_address(flag: str, text: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT``. ConfigError, which names ``flag``, if it is no such."""
    found = _HOST_PORT.fullmatch(text)
    if found is None or int(found[2]) > _MAX_PORT:
        raise ConfigError(f"{flag} {text}: write HOST:PORT")
    return found[1].strip("[]"), int(found[2])


def split_places(models: Sequence[str]) -> list[Place]:
    """Every one of ``--models``. ConfigError unless one of them is here."""
    found = [split_place(text) for text in models]
    if all(place.remote for place in found):
        raise ConfigError(f"--models {','.join(models)}: at least one of them must be here")
    return found


def check_first(places: Sequence[Place]) -> None:
    """ConfigError where the first model is at a server that takes ids.

    Such a server is told of no router, so what it writes comes back to the first model, which can
    only be another one.
    """
    name, remote = places[0]
    if remote.startswith(OPENAI):
        raise ConfigError(
            f"--models {name}@{remote}: the first of them begins every answer, which no openai: "
            "server can; name one that is here first, as in "
            f"--models {next(each.name for each in places if not each.remote)},{name}@{remote}"
        )


def with_placeholder(models: tuple[str, ...], edge_listen: str) -> tuple[str, ...]:
    """``--models`` as it is meant where an edge port listens: whoever dials in has the entry model.

    Raises ConfigError where a placeholder has no port to stand at.
    """
    places = split_places(models)
    placeholders = any(place.is_placeholder for place in places)
    if edge_listen and not placeholders:
        return (PLACEHOLDER, *models)
    if placeholders and not edge_listen:
        raise ConfigError(
            "--models: NAME@edge stands for a model of whoever dials in; say where to listen: "
            "--edge-listen HOST:PORT"
        )
    return models
