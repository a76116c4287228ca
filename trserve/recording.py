"""Where an instance records, found out before it starts; and the ends that an ``Engine`` adds.

Refuses a directory whose records are of other models or shapes: what is trained on one recording
must be of one kind. Knows no requests, no rows of models and no torch.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from trserve.errors import ConfigError
from trserve.record_format import (
    END_ROW,
    ENDS_SUFFIX,
    FINISH_REASONS,
    RecordHeader,
    headers_in,
    write_all,
)

log = logging.getLogger(__name__)
_INSTEAD: Final = "give an empty directory, or one that these models wrote"


class RecordPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Where to record, and what the rows of each model are."""

    directory: str
    headers: list[RecordHeader]

    @property
    def run(self) -> str:
        """The name of this run."""
        return self.headers[0].run


def plan_record(directory: Path, headers: Sequence[RecordHeader]) -> RecordPlan:
    """Make ``directory`` where it is not there, and see that it can take rows of ``headers``.

    Raises:
        ConfigError: it cannot be written to, or holds records of other models or shapes.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        found = headers_in(directory)
    except OSError as error:
        raise ConfigError(f"--record {directory}: {error.strerror}") from None
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError(f"--record {directory}: no permission to write there")
    for header in found:
        if header.index >= len(headers):
            raise _other(directory, "models", header.models, headers[0].models)
        _check_same(directory, header, headers[header.index])
    for header in headers:
        header.encode()
    return RecordPlan(directory=str(directory.resolve()), headers=list(headers))


def _check_same(directory: Path, old: RecordHeader, new: RecordHeader) -> None:
    for name in old.__struct_fields__:
        if name != "run" and getattr(old, name) != getattr(new, name):
            what = name if name == "models" else f"{name} of {new.models[new.index]}"
            raise _other(directory, what, getattr(old, name), getattr(new, name))


def _other(directory: Path, what: str, old: object, new: object) -> ConfigError:
    return ConfigError(
        f"--record {directory}: the records there differ ({what}: {old} there, {new} now)\n"
        f"{_INSTEAD}"
    )


class EndLog:
    """How much of each answer was delivered; what was committed beyond that is overshoot.

    A write that fails is said once; then the ends of later requests are missing.
    """

    def __init__(self, plan: RecordPlan) -> None:
        self._path = Path(plan.directory) / f"{plan.run}{ENDS_SUFFIX}"
        self._stopped = False

    def add(self, request: int, tokens: int, finish: str) -> None:
        """Note that ``tokens`` of ``request`` were delivered; ``finish`` is of ``FINISH_REASONS``.

        May be called from several threads: what is appended in one write does not mix.
        """
        if self._stopped:
            return
        row = np.array([(request, tokens, FINISH_REASONS.index(finish))], END_ROW)
        try:
            with self._path.open("ab", buffering=0) as file:
                write_all(file.fileno(), row)
        except OSError as error:
            self._stopped = True
            log.error("recording of ends stopped: %s: %s", self._path, error.strerror)
