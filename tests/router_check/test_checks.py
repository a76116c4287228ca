"""The contract: a sound router keeps it, and each broken one fails the check that it should."""

from __future__ import annotations

import re

import pytest
from click.testing import CliRunner

from tests.router_check import broken
from trserve.cli import main
from trserve.errors import ConfigError
from trserve.router_check.checks import check_router

MODULE = broken.__name__


def failures(name, **settings):
    checks = check_router(f"{MODULE}:{name}", **settings)
    return {check.name: check.detail for check in checks if check.passed is False}


@pytest.mark.parametrize(
    ("name", "check", "message"),
    [
        ("OutOfRange", "route", r"row 0 of .* at model 1 .*route returned 2; 0 to 1 are valid"),
        ("TooFewRows", "route", "route returned 0 rows for 1"),
        ("Raises", "route", r"row \d of \d, token 9 at model \d .*nine \(broken.py:\d+\)"),
        ("Writes", "route", r"model \d .*writes into result.logits"),
        ("Lowers", "route", r"writes into result.params\['tau'\]"),
        ("Hasty", "route", r"model \d .*decides_early, but .* it says \[.*\] and after it \["),
        ("Peeking", "route", r"decides_early, but .* it says \[.*\] and after it \["),
        ("Late", "route", r"decides_early, but .* it says IndexError: .*broken.py"),
        ("Unfortunate", "route", r"^row \d of \d(?!.*decides_early)"),
        ("WrongLoc", "handoff", r"loc is \d+, but \d+ tokens are committed"),
        ("TooMuchToSay", "handoff", "extras of 65 bytes; 64 at most"),
        ("CannotReceive", "handoff", "receive, token 0 at model 0 .*KeyError"),
        ("AdmitsNobody", "admit", "returned 7; the models are 0 to 1"),
        ("AdmitsHalf", "admit", "TypeError: 'float' object"),
        ("AdmitsBoth", "admit", "only integer tensors"),
        ("Forgetful", "restart", "replaced, request 0 .* at token .* route said"),
        ("Social", "alone", "for the same logits, hidden state and token"),
        ("Moody", "twice", "went another way at token"),
        ("KeepsAtWhim", "twice", "went another way"),
        ("DeafToRequests", "parameters", r"take it from result.params\['tau'\]"),
        ("ScoresInPairs", "score", r"returned \[2, \d\] for \d rows"),
    ],
)
def test_what_is_broken_is_found(name, check, message):
    found = failures(name)
    assert check in found, found
    assert re.search(message, found[check]), found[check]


def test_after_a_failure_of_route_nothing_else_is_claimed():
    checks = check_router(f"{MODULE}:Raises")
    skipped = [check for check in checks if check.passed is None]
    assert {"finish", "twice", "alone", "restart"} <= {check.name for check in skipped}


def test_one_that_would_go_to_and_fro_ends_and_is_told_so():
    checks = {check.name: check for check in check_router(f"{MODULE}:PingPong")}
    assert checks["progress"].passed
    assert "tokens were kept by the runtime alone" in checks["progress"].detail


@pytest.mark.parametrize(
    ("router", "models"),
    [
        ("r-stitch", ("tiny", "small")),
        ("top-prob", ("tiny", "small")),
        ("step-leader", ("tiny", "small")),
        ("random", ("tiny", "small")),
        ("me", ("tiny", "small", "small")),
    ],
)
def test_the_library_keeps_the_contract(router, models):
    failed = [check for check in check_router(router, models=models) if not check.passed]
    assert failed == []


def test_the_command_prints_a_line_a_check_and_says_by_its_code_whether_all_passed():
    run = CliRunner().invoke(main, ["router", "check", f"{MODULE}:Sound"])
    assert run.exit_code == 0
    lines = run.stdout.splitlines()
    assert all(line.startswith("ok") for line in lines)
    assert [line.split()[1] for line in lines][:2] == ["start", "route"]
    run = CliRunner().invoke(main, ["router", "check", f"{MODULE}:Social"])
    assert run.exit_code == 1
    assert "FAIL  alone" in run.stdout
    assert "alone failed" in run.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["no_such_module:X"], "cannot import no_such_module:X"),
        ([f"{MODULE}:CannotStart"], "failed to start: FileNotFoundError"),
        ([f"{MODULE}:Sound", "--router-config", "sigma=1"], "no parameter 'sigma'"),
        ([f"{MODULE}:Sound", "--models", "tiny,nonesuch"], "nonesuch"),
    ],
)
def test_what_cannot_start_fails_with_the_reason(args, message):
    run = CliRunner().invoke(main, ["router", "check", *args])
    assert run.exit_code == 1
    assert message in run.stderr
    assert "Traceback" not in run.stderr


def test_models_at_other_hosts_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"small@10\.0\.0\.2:9000: a router is checked"):
        check_router("me", models=("tiny", "small@10.0.0.2:9000"))
