"""Bars: on a terminal only, and never in what a benchmark prints."""

import pytest

from bench.common import progress, track


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as rich reads it, a terminal
    monkeypatch.setenv("TERM", "xterm")


def test_a_bar_counts_on_a_terminal(terminal, capsys):
    assert list(track(range(3), "settings")) == [0, 1, 2]
    shown = capsys.readouterr()
    assert "settings" in shown.err and "3/3" in shown.err and shown.out == ""


def test_without_a_known_end_it_only_counts(terminal, capsys):
    with progress("under load") as bar:
        bar.advance(2, "7 failed")
        print("a result")
    shown = capsys.readouterr()
    assert "7 failed" in shown.err and "2/?" in shown.err and shown.out == "a result\n"


def test_of_two_bars_the_outer_one_is_shown(terminal, capsys):
    for _ in track("ab", "outer"):
        assert list(track("xyz", "inner")) == ["x", "y", "z"]
    shown = capsys.readouterr().err
    assert "outer" in shown and "inner" not in shown
    assert list(track("xyz", "inner")) == ["x", "y", "z"]
    assert "inner" in capsys.readouterr().err


def test_elsewhere_nothing_is_shown(monkeypatch, capsys):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    assert list(track(iter("ab"), "settings")) == ["a", "b"]
    assert capsys.readouterr() == ("", "")
