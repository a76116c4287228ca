"""Problems of a file, and what of an answer is taken for its number."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path

import pytest

from bench.pareto import is_right
from bench.problem_files import found_number, read_problems
from trserve.demo.grammar import held_out


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("She makes 9 * 2 = $<<9*2=18>>18 a day.\n#### 18", "18"),
        ("#### 1,234,567 of 8", "1234567"),
        ("First #### 3, no: #### -4.50.", "-4.5"),
        ("So there are 12 apples, which is $3,000.", "3000"),
        ("The answer is 7.", "7"),
        ("half of it, .5", "0.5"),
        ("nothing", None),
        ("7 apples, so ####", None),
    ],
)
def test_the_number_of_an_answer(text: str, number: str | None) -> None:
    assert found_number(text) == (None if number is None else Decimal(number))


def test_problems_are_read_and_answers_checked(tmp_path: Path) -> None:
    lines = [{"question": f"{n}?", "answer": f"it is {n}\n#### {n}.0"} for n in (5, 1200)]
    file = tmp_path / "problems.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert [each.question for each in read_problems(file, 1)] == ["5?"]
    _, problem = read_problems(file)
    assert is_right(problem, "all in all 1,200 of them") and not is_right(problem, "1,200 or 12")
    (own,) = held_out(1, seed=3)
    assert is_right(own, own.answer) and not is_right(own, f"The answer is {own.value + 1}.")


@pytest.mark.parametrize("line", ["{}", "[1]", '{"question": "a", "answer": "5"}', "no json", ""])
def test_a_line_that_is_none_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "problems.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(SystemExit, match=r"problems.jsonl(, line 1: .*question|.*####|: no prob)"):
        read_problems(file)
