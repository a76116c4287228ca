"""Problems with a number for an answer, from a file by path, and how an answer to one is checked.

The format is that of GSM8K: a JSON object a line, with ``question`` and ``answer``, the number
after ``####`` in the latter. Knows no model and no server.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Final

_MARK: Final = "####"
_NUMBER: Final = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")


@dataclass(frozen=True)
class WordProblem:
    """A question and the number that is right."""

    question: str
    value: Decimal

    def is_right(self, text: str) -> bool:
        """Whether ``text`` comes to the number."""
        return found_number(text) == self.value


def found_number(text: str) -> Decimal | None:
    """The first number after the last ``####``; without that mark, the last number of ``text``.

    Thousands may be set apart by commas; a currency sign or a full stop beside it is no part of it.
    """
    _, mark, answer = text.rpartition(_MARK)
    numbers = _NUMBER.findall(answer)
    if not numbers:
        return None
    return Decimal(numbers[0 if mark else -1].replace(",", ""))


def read_problems(path: Path, first: int | None = None) -> list[WordProblem]:
    """The problems in ``path``, the first so many. Ends the program where a line is none."""
    found: list[WordProblem] = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if first is not None and len(found) >= first:
                break
            if line.strip():
                found.append(_problem(line, f"{path.name}, line {number}"))
    if not found:
        sys.exit(f"{path.name}: no problems in it")
    return found


def _problem(line: str, where: str) -> WordProblem:
    try:
        content = json.loads(line)
        question, answer = content["question"], content["answer"]
        value = found_number(answer)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        sys.exit(f"{where}: expected an object with question and answer ({error!r})")
    if value is None or _MARK not in answer:
        sys.exit(f"{where}: its answer has no number after {_MARK}")
    return WordProblem(str(question), value)
