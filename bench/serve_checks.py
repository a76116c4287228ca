"""What a run must keep to: ``--assert "p99_itl_ms<50"`` and ``--goodput ttft:200 tpot:50``.

An assertion is a name, a comparison and a number; nothing is evaluated. Knows no measurements.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final

_COMPARISONS: Final[dict[str, Callable[[float, float], bool]]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}
_FORM: Final = re.compile(
    r"\s*([A-Za-z_]\w*)\s*(<=|>=|==|!=|<|>)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*"
)


@dataclass(frozen=True)
class Assertion:
    """``name`` of every row must compare so with ``number``."""

    name: str
    comparison: str
    number: float

    def __str__(self) -> str:
        return f"{self.name}{self.comparison}{self.number:g}"

    def failure(self, row: Mapping[str, Any]) -> str | None:
        """Why it does not hold of ``row``; None if it does. What has no value does not hold."""
        value = row[self.name]
        if value is None:
            return f"{self}: {self.name} has no value here"
        if _COMPARISONS[self.comparison](value, self.number):
            return None
        return f"{self}: it is {value:.6g}"


def read_assertion(text: str, names: Collection[str]) -> Assertion:
    """Parse ``NAME OP NUMBER``; SystemExit where it is none or the name is not in ``names``."""
    found = _FORM.fullmatch(text)
    if found is None:
        raise SystemExit(
            f"--assert {text!r}: write a name, one of {' '.join(_COMPARISONS)} and a number, "
            'as "p99_itl_ms<50"'
        )
    name, comparison, number = found.groups()
    if name not in names:
        raise SystemExit(f"--assert {text!r}: no number is called {name}{_meant(name, names)}")
    return Assertion(name, comparison, float(number))


def read_limits(parts: Sequence[str], names: Collection[str]) -> dict[str, float]:
    """``NAME:MS`` parts as a mapping; SystemExit where one is none."""
    limits: dict[str, float] = {}
    for part in parts:
        name, _, value = part.partition(":")
        name = name.lower().removesuffix("l") if name.lower() == "e2el" else name.lower()
        if name not in names:
            raise SystemExit(f"--goodput {part}: no latency is called {name}{_meant(name, names)}")
        try:
            limits[name] = float(value)
        except ValueError:
            raise SystemExit(f"--goodput {part}: write NAME:MILLISECONDS") from None
        if not limits[name] > 0:
            raise SystemExit(f"--goodput {part}: must be above 0")
    return limits


def _meant(name: str, names: Collection[str]) -> str:
    close = get_close_matches(name, list(names), n=3, cutoff=0.6)
    if close:
        return f"; did you mean {' or '.join(close)}?"
    return f"; there are {', '.join(sorted(names))}"
