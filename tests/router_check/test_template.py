"""``trserve router new``: what it writes is a router that works, with a test that passes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from trserve.cli import main
from trserve.router_check.testing import answer, plain_loop, prompts


def new(*args: object):
    return CliRunner().invoke(main, ["router", "new", *map(str, args)])


def test_its_test_passes(tmp_path: Path):
    run = new("my_router", "--dir", tmp_path / "deep")
    assert run.exit_code == 0, run.stderr
    folder = tmp_path / "deep"
    assert sorted(file.name for file in folder.iterdir()) == ["my_router.py", "test_my_router.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


def test_the_example_is_about_15_lines(tmp_path: Path):
    new("r", "--dir", tmp_path)
    code = [line for line in (tmp_path / "r.py").read_text().splitlines() if line.strip()]
    code = code[code.index("class R(BaseRouter):") :]
    assert sum(not line.strip().startswith("#") for line in code) <= 18


def test_files_that_are_there_stay(tmp_path: Path):
    (tmp_path / "test_mine.py").write_text("precious")
    run = new("mine", "--dir", tmp_path)
    assert run.exit_code == 2
    assert "test_mine.py is there already; nothing was written" in run.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["test_mine.py"]
    assert (tmp_path / "test_mine.py").read_text() == "precious"


@pytest.mark.parametrize("name", ["my-router", "3d", "class", "a.b", ""])
def test_a_name_that_is_no_module_is_refused(tmp_path: Path, name: str):
    run = new(name, "--dir", tmp_path)
    assert run.exit_code == 2
    assert "not a name for a Python module" in run.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_plain_loop_tells_rules_apart():
    """It would not be worth comparing with if it wrote the same whatever the rule says."""
    (prompt,) = prompts(1)
    alone = plain_loop(lambda model, logits, token: (0, True), prompt, max_tokens=12)
    assert alone == answer("none", prompt, max_tokens=12)
    assert set(alone.sources) == {0}
    other = plain_loop(lambda model, logits, token: (1, model == 1), prompt, max_tokens=12)
    assert set(other.sources) == {1}
    with pytest.raises(AssertionError, match="discards every model's token"):
        plain_loop(lambda model, logits, token: (1 - model, False), prompt, max_tokens=3)
