"""A stage in parts: what one of them finds is told at once, and one that fails costs itself only.

Knows how a stage speaks (JSON objects, a line each); nothing of what it says.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from typing import Any, Final, TypeVar

from tests.serverproc import StartFailedError

T = TypeVar("T")
_QUOTED: Final = 4000
"""Characters of what a server said before it ended."""


def tell(detail: dict[str, Any]) -> None:
    """What the stage has so far; whoever ends it has that."""
    print(json.dumps(detail, default=str), flush=True)


def told(error: BaseException) -> str:
    """What went wrong; of a server that did not start, all that it said."""
    started = error.__cause__ if isinstance(error.__cause__, StartFailedError) else error
    if isinstance(started, StartFailedError):
        return f"no server (exit code {started.code}): {started.stderr[-_QUOTED:].strip()}"
    if isinstance(error, ExceptionGroup):
        return f"{error}: " + "; ".join(told(inner) for inner in error.exceptions[:3])
    return f"{type(error).__name__}: {error}"


class Parts:
    """The parts of one stage.

    Attributes:
        found: what the stage says so far; ``failed`` in it has the errors by part.
    """

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def run(self, name: str, work: Callable[[], T]) -> T | None:
        """What ``work`` returns, None where it fails; told either way."""
        try:
            value = work()
        except Exception as error:
            # Any way of failing is a result; where it began is what a person looks for.
            traceback.print_exc()
            self.found.setdefault("failed", {})[name] = told(error)
            value = None
        else:
            self.found[name] = value
        tell(self.found)
        return value
