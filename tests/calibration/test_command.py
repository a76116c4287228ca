"""``trserve calibrate`` on the embedded pair: its promise holds for prompts it has not seen."""

from __future__ import annotations

import json
from contextlib import nullcontext

import pytest
from click.testing import CliRunner

from tests.router_check import broken
from trserve import Engine
from trserve.calibration import command
from trserve.calibration.command import Result
from trserve.calibration.shares import Share
from trserve.cli import main
from trserve.demo.grammar import held_out

MAX_TOKENS = 80


def calibrate(*args: object):
    return CliRunner().invoke(main, ["calibrate", *map(str, args), "--threads", "1,1"])


def share_of(problems, parameter: str, threshold: float, router: str) -> float:
    """As a user of the server would count it."""
    with Engine(models=("tiny", "small"), router=router, threads=(1, 1)) as engine:
        answers = engine.generate(
            [[{"role": "user", "content": problem.question}] for problem in problems],
            temperature=0,
            max_tokens=MAX_TOKENS,
            trserve={"router": {parameter: threshold}},
        )
    usages = [answer.usage["trserve"]["tokens"] for answer in answers]
    others = sum(usage.get("small", 0) for usage in usages)
    return others / sum(sum(usage.values()) for usage in usages)


@pytest.mark.parametrize(
    ("router", "parameter", "target"),
    [
        ("top-prob", "threshold", 0.1),
        pytest.param("random", "p", 0.3, marks=pytest.mark.slow),
    ],
)
def test_the_share_holds_for_other_prompts(tmp_path, router, parameter, target):
    problems = held_out(360, 77)
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(problem.question for problem in problems[:240]))
    run = calibrate(
        "--router", router, "--target-share", target, "--prompts", file, "--json",
        "--max-tokens", MAX_TOKENS,
    )  # fmt: skip
    assert run.exit_code == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["parameter"] == parameter
    assert found["calibration"]["prompts"] == found["held_out"]["prompts"] == 120
    assert abs(found["calibration"]["share"] - target) < 0.005
    assert {"threshold": found["threshold"], "share": found["calibration"]["share"]} in found[
        "runs"
    ]
    held = found["held_out"]
    assert 0 < held["standard_error"] < 0.03
    assert abs(held["share"] - target) < 4 * held["standard_error"]
    # The bound for what is verified on prompts enough is 0.01; here they are 120.
    other = share_of(problems[240:], parameter, found["threshold"], router)
    assert abs(other - target) < 0.03


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--router", "none"], "no number that a request may set"),
        (["--router", "me", "--models", "tiny,small,small"], "give --prompts FILE"),
        (["--router", "nonesuch"], "unknown router"),
    ],
)
def test_what_cannot_be_calibrated_is_said(args, message):
    run = calibrate(*args, "--target-share", 0.1)
    assert run.exit_code == 2
    assert message in run.stderr
    assert run.stdout == ""


@pytest.mark.parametrize(
    ("flags", "ending"),
    [
        ([], ""),
        (["--dtype", "float32"], " --dtype float32"),
        (
            ["--dtype", "bfloat16", "--quantization", "int8"],
            " --dtype bfloat16 --quantization int8",
        ),
    ],
)
def test_the_line_to_launch_with_has_the_precision_that_was_measured(flags, ending, monkeypatch):
    share = Share([1, 1], [10, 10])
    result = Result("entropy", "tau", 0.1, 0.5, share, share)
    monkeypatch.setattr(command, "find", lambda *args: result)
    monkeypatch.setattr(command, "Runs", lambda *args: None)
    monkeypatch.setattr(command, "Engine", lambda **settings: nullcontext())
    run = calibrate("--router", "entropy", "--target-share", 0.1, *flags)
    assert run.exit_code == 0, run.stderr
    line = "trserve launch --models tiny,small --router entropy --router-config tau=0.5"
    assert run.stdout.splitlines()[-1] == line + ending


def test_too_few_prompts_and_shares_out_of_reach_are_refused(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "1 + 1 ="}\n' * 8)
    run = calibrate("--router", "entropy", "--target-share", 0.1, "--prompts", file)
    assert run.exit_code == 2
    assert "1 different prompts" in run.stderr
    assert calibrate("--router", "entropy", "--target-share", 1.5).exit_code == 2
    lines = [json.dumps({"prompt": f"{n} + {n} ="}) for n in range(12)]
    file.write_text("\n".join(lines))
    args = ["--router", f"{broken.__name__}:Timid", "--target-share", 0.5]
    run = calibrate(*args, "--prompts", file, "--max-tokens", 4)
    assert run.exit_code == 2
    assert "with tau from 0.9 to 1 the share goes from 0 to 0" in run.stderr
