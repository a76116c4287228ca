"""The stages of the suite: every test is in one, and a failure is never passed over."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest

from tests import stages
from tests.stages import BESIDE, FIRST, LAST, ROOT, Stage, Suite


def python(name: str, code: str) -> Stage:
    return Stage(name, (sys.executable, "-c", code))


def files_of(stage: Stage) -> list[Path]:
    """The test files that a stage of tests runs."""
    if "pytest" not in stage.command:
        return []
    words = iter(stage.command[stage.command.index("pytest") + 1 :])
    wanted: set[Path] = set()
    ignored: list[Path] = []
    for word in words:
        if word in ("--ignore", "-o"):
            (ignored if word == "--ignore" else []).append(ROOT / next(words))
        elif not word.startswith("-"):
            path = ROOT / word
            assert path.exists(), word
            wanted |= set(path.rglob("test_*.py")) if path.is_dir() else {path}
    return [each for each in wanted if not any(each.is_relative_to(path) for path in ignored)]


def test_every_test_is_in_exactly_one_stage():
    run = [path for stage in (*FIRST, *BESIDE, *LAST) for path in files_of(stage)]
    all_files = set((ROOT / "tests").rglob("test_*.py"))
    assert sorted(run) == sorted(all_files)


def test_what_a_stage_says_comes_whole_and_with_its_time(capsys):
    talk = "import time\nfor n in range(3): print('{0}', n, flush=True); time.sleep(0.05)"
    suite = Suite(goes_on=False)
    suite.run(tuple(python(name, talk.format(name)) for name in "ab"), at_once=2)
    said = capsys.readouterr().out.splitlines()
    for name in "ab":
        at = said.index(f"== {name}")
        assert said[at + 1 : at + 4] == [f"{name} {n}" for n in range(3)]
        assert re.fullmatch(rf"== {name}: \d+ s", said[at + 4])
    assert suite.failed == []


def test_two_at_a_time(tmp_path):
    meet = """
import pathlib, sys, time
here, there = (pathlib.Path({0!r}) / each for each in {1!r})
here.touch()
until = time.monotonic() + 20
while not there.exists():
    if time.monotonic() > until: sys.exit("the other one was not begun")
    time.sleep(0.01)
"""
    suite = Suite()
    both = tuple(python(a, meet.format(str(tmp_path), (a, b))) for a, b in ("ab", "ba"))
    suite.run(both, at_once=2)
    assert suite.failed == []


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_failure_ends_the_usual_tier_and_not_the_full_one(goes_on, capsys):
    suite = Suite(goes_on=goes_on)
    suite.run((python("bad", "raise SystemExit('why')"), python("good", "")))
    said = capsys.readouterr().out.splitlines()
    assert suite.failed == ["bad"]
    assert "why" in said and any(line.startswith("== bad failed after ") for line in said)
    assert any(line.startswith("== good: ") for line in said) is goes_on


def test_a_stage_that_hangs_is_interrupted_and_fails(capsys):
    suite = Suite(limit_s=0.5)
    suite.run((python("hangs", "import time\ntime.sleep(60)"),))
    said = capsys.readouterr().out
    assert suite.failed == ["hangs"]
    assert "took more than 0.5 s" in said and "KeyboardInterrupt" in said


def test_it_is_interrupted_in_the_background_of_a_shell_too(monkeypatch, capsys):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for part in ("FIRST", "BESIDE", "LAST"):
            monkeypatch.setattr(stages, part, ())
        assert stages.main() == 0
        suite = Suite(limit_s=0.5)
        suite.run((python("hangs", "import time\ntime.sleep(60)"),))
    finally:
        signal.signal(signal.SIGINT, before)
    assert "KeyboardInterrupt" in capsys.readouterr().out


def test_a_program_that_is_not_there_is_a_failure():
    suite = Suite()
    suite.run((Stage("none", ("no-such-program",)),))
    assert suite.failed == ["none"]


@pytest.mark.parametrize(("failing", "code"), [("", 0), ("lint", 1), ("types", 1), ("last", 1)])
def test_the_exit_code_says_whether_all_passed(failing, code, monkeypatch, capsys):
    names = {"FIRST": "lint", "BESIDE": "types", "LAST": "last"}
    for part, name in names.items():
        stage = python(name, f"raise SystemExit({int(name == failing)})")
        monkeypatch.setattr(stages, part, (stage,))
    monkeypatch.setattr(stages, "FULL", False)
    assert stages.main() == code
    assert (f"== failed: {failing}" in capsys.readouterr().out) is bool(failing)


def test_some_stages_by_name(monkeypatch, capsys):
    monkeypatch.setattr(stages, "FIRST", (python("a", "raise SystemExit(1)"),))
    monkeypatch.setattr(stages, "BESIDE", tuple(python(name, "") for name in ("b", "c")))
    monkeypatch.setattr(stages, "LAST", ())
    assert stages.main(["b"]) == 0
    said = capsys.readouterr().out.splitlines()
    shown = [re.sub(r"\d+ s$", "N s", line) for line in said]
    assert shown == ["-- b", "== b", "== b: N s", "== some: N s"]
    assert stages.main(["b", "d"]) == 2
    found = capsys.readouterr()
    assert "no stage 'd'; there are a, b, c" in found.err and not found.out
