"""``docs/pitfalls.md``: every reported fault has tests, and they exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
NUM_FAULTS = 49
WITHOUT_A_GPU = {"P42"}
_ROW = re.compile(r"^\| (P\d+) \| .+ \| (.+) \|$", re.MULTILINE)
_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def test_each_fault_has_tests_that_exist() -> None:
    rows = _ROW.findall((ROOT / "docs" / "pitfalls.md").read_text())
    assert [name for name, _ in rows] == [f"P{n}" for n in range(1, NUM_FAULTS + 1)]
    functions: dict[str, set[str]] = {}
    for name, cell in rows:
        tests = _TEST.findall(cell)
        assert tests or name in WITHOUT_A_GPU, f"{name} has no test"
        for path, test in tests:
            if path not in functions:
                nodes = ast.walk(ast.parse((ROOT / path).read_text()))
                functions[path] = {n.name for n in nodes if isinstance(n, ast.FunctionDef)}
            assert test in functions[path], f"{name}: there is no {test} in {path}"
