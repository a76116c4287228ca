"""What a check has found, and how it is told: lines for a person, JSON for a program.

Knows no check.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

from trserve.errors import StartupError

SCHEMA_VERSION: Final = 1
_UNPROVEN: Final = "unproven on a device"


class Level(IntEnum):
    """How bad it is; the worst of all findings is the exit code."""

    OK = 0
    WARNING = 1
    FAULT = 2


@dataclass(frozen=True)
class Finding:
    """One result.

    Attributes:
        check: what was looked at, in a word or two.
        level: faults keep a server from starting or serving; warnings cost speed or capacity.
        what: what is there.
        parameter: the flag, variable, key or limit that decides it; empty where none does.
        fix: what to do; empty for ``OK``.
        unproven: the check was written without a device to try it on.
    """

    check: str
    level: Level
    what: str
    parameter: str = ""
    fix: str = ""
    unproven: bool = False

    @classmethod
    def of_error(cls, check: str, error: StartupError, parameter: str, fix: str = "") -> Finding:
        """A fault that ``trserve launch`` would end with, in its words.

        Its message has what to do on a second line, or behind a semicolon; else ``fix`` says it.
        """
        what, _, own_fix = str(error).partition("\n")
        if not own_fix and not fix:
            what, _, own_fix = what.rpartition("; ")
        return cls(check, Level.FAULT, what or own_fix, parameter, own_fix or fix)

    def to_json(self) -> dict[str, Any]:
        """Its members by name."""
        return {
            "check": self.check,
            "level": self.level.name.lower(),
            "what": self.what,
            "parameter": self.parameter,
            "fix": self.fix,
            "unproven_on_a_device": self.unproven,
        }


def exit_code(findings: Sequence[Finding]) -> int:
    """0 well, 1 warnings, 2 faults."""
    return max((finding.level for finding in findings), default=Level.OK)


def to_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """The whole report."""
    return {
        "schema_version": SCHEMA_VERSION,
        "exit_code": int(exit_code(findings)),
        "findings": [finding.to_json() for finding in findings],
    }


def lines(finding: Finding) -> list[str]:
    """The finding as text: what is there, and below it what decides it and what to do."""
    mark = " " * 7 if finding.level is Level.OK else finding.level.name.lower().ljust(7)
    label = f" ({_UNPROVEN})" if finding.unproven else ""
    shown = [f"{mark}  {finding.check}: {finding.what}{label}"]
    if finding.level is not Level.OK:
        shown.append(f"         {': '.join(filter(None, (finding.parameter, finding.fix)))}")
    return shown


def summary(findings: Sequence[Finding]) -> str:
    """The last line."""
    counts = {level: sum(f.level is level for f in findings) for level in Level}
    parts = [
        f"{counts[level]} {level.name.lower()}{'s' if counts[level] != 1 else ''}"
        for level in (Level.FAULT, Level.WARNING)
        if counts[level]
    ]
    return ", ".join(parts) or "well: nothing here keeps a server from starting"
