"""Emulated servers as users run them: pace, routing, three models, one model, bad profiles."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from tests.emulated.profiles import changed, saved
from tests.serverproc import Server, concurrently, run_command, wait_until

EMULATED = ("--device", "emulated")
STEP_S, LARGE_S = 0.006, 0.0279
P = 0.35
KEY = "key-for-tests-alone"
ROUTING = "/v1/trserve/routing"
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def pair() -> Iterator[Server]:
    models = ("--models", "0.6b,32b", "--batch-threshold", "1,1", "--admin-key", KEY)
    with Server([*EMULATED, *models]) as running:
        yield running


def ask(server: Server, tokens: int, **fields: Any) -> dict[str, Any]:
    body = {"prompt": [5, 6, 7], "max_tokens": tokens, "trserve": {"trace": True}, **fields}
    answer: dict[str, Any] = server.post(COMPLETIONS, body)
    assert answer["usage"]["completion_tokens"] == tokens
    return answer


def test_it_says_what_it_is(pair: Server) -> None:
    assert (pair.models, pair.router, pair.device) == (["0.6b", "32b"], "emulated", "emulated")
    assert "EMULATED: no model computes anything here" in pair.stderr
    assert "profile a100-0.6b-32b" in pair.stderr


def test_an_answer_takes_the_steps_of_its_model(pair: Server) -> None:
    for name, step_s in (("0.6b", STEP_S), ("32b", LARGE_S)):
        took = []
        for _ in range(3):  # on a busy machine, one of them is undisturbed
            began = time.monotonic()
            usage = ask(pair, 50, trserve={"only": name})["usage"]
            took.append(time.monotonic() - began)
            assert usage["trserve"]["tokens"][name] == 50
            if took[-1] < 1.2 * 50 * step_s:
                break
        assert 50 * step_s <= min(took) < 1.5 * 50 * step_s + 0.1


def test_requests_travel_as_the_profile_says(pair: Server) -> None:
    """R2R: each position is the large model's with probability p, and each visit is one token."""
    answers = concurrently(lambda seed: ask(pair, 60, seed=seed), range(8), 8)
    sources = [answer["choices"][0]["trserve"]["source"] for answer in answers]
    large = sum(map(sum, sources))
    assert stats.binomtest(large, 480, P).pvalue > 1e-4
    for answer, source in zip(answers, sources, strict=True):
        counts = answer["usage"]["trserve"]
        assert counts["tokens"] == {"0.6b": 60 - sum(source), "32b": sum(source)}
        # There and back for each token of the large model, but for the answer's last.
        assert counts["handoffs"] == 2 * sum(source) - source[-1]


def test_the_same_seed_travels_alike_and_the_text_is_of_the_row(pair: Server) -> None:
    fields = {"seed": 11, "return_token_ids": True, "temperature": 0.9}
    first, second = (ask(pair, 40, **fields)["choices"][0] for _ in range(2))
    assert first["token_ids"] == second["token_ids"]
    assert first["trserve"]["source"] == second["trserve"]["source"]
    assert first["text"].isprintable() and len(first["text"]) >= 40


def test_the_probabilities_of_its_profile_are_told_and_may_be_changed(pair: Server) -> None:
    def change(body: Any) -> dict[str, Any]:
        sent = {"Authorization": f"Bearer {KEY}"}
        answer = pair.request("GET" if body is None else "POST", ROUTING, body, sent)
        assert answer.status == 200, answer.body
        found = answer.json()["router"]["parameters"]
        return {name: (each["value"], each["started_with"]) for name, each in found.items()}

    assert change(None) == {"p": (P, P), "q": (1.0, 1.0)}
    try:
        assert change({"router": {"p": 0.0}}) == {"p": (0.0, P), "q": (1.0, 1.0)}
    finally:
        assert change({"router": {"p": None}}) == {"p": (P, P), "q": (1.0, 1.0)}
    assert "p from 0.35 to 0" in pair.stderr


def test_a_request_may_have_its_own_p(pair: Server) -> None:
    own: dict[str, Any] = {"trserve": {"router": {"p": 0.0}}}
    assert ask(pair, 30, **own)["usage"]["trserve"]["tokens"] == {"0.6b": 30, "32b": 0}
    own = {"trserve": {"router": {"p": 1.0}}}
    assert ask(pair, 10, **own)["usage"]["trserve"]["tokens"]["32b"] == 10


def test_prompts_are_scored_and_logprobs_are_of_the_token_made_up(pair: Server) -> None:
    answer = ask(pair, 3, prompt="How many pencils", echo=True, logprobs=1, trserve={})
    found = answer["choices"][0]["logprobs"]
    assert found["token_logprobs"][-3:] == [0.0, 0.0, 0.0]
    assert len(found["tokens"]) == answer["usage"]["total_tokens"]


def test_waits_and_phases_are_those_of_its_steps(pair: Server) -> None:
    """A sum of nanoseconds that is none once ran out of 64 bits, and ended the worker."""

    def sums() -> dict[str, float]:
        page = pair.request("GET", "/metrics").body.decode()
        rows = (line.rpartition(" ") for line in page.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, _, value in rows}

    asked = ask(pair, 40, seed=3)["usage"]["trserve"]
    visits = 'handoff_seconds_count{dst="32b",phase="exec",src="0.6b"}'
    assert asked["tokens"]["32b"] > 2
    found = wait_until(sums, lambda now: now[f"trserve_{visits}"] >= asked["tokens"]["32b"], 5.0)
    assert min(value for name, value in found.items() if "_seconds_sum" in name) >= 0
    count = found[f"trserve_{visits}"]
    took = found[f"trserve_{visits.replace('count', 'sum')}"] / count
    assert LARGE_S <= took < 2 * LARGE_S


def test_three_models_serve_and_each_writes_its_share() -> None:
    arguments = [*EMULATED, "--profile", "a100-0.6b-8b-32b", "--max-model-len", "32768"]
    with Server(arguments) as server:
        assert server.models == ["0.6b", "8b", "32b"]
        answers = concurrently(lambda seed: ask(server, 40, seed=seed), range(8), 8)
        sources = [s for a in answers for s in a["choices"][0]["trserve"]["source"][1:]]
        counts = [sources.count(model) for model in range(3)]
        expected = [share * len(sources) for share in (0.5, 0.3, 0.2)]
        assert stats.chisquare(counts, expected).pvalue > 1e-4
        assert server.stop() == 0
        assert not server.wait_gone()


def test_one_model_of_a_profile_serves_alone() -> None:
    with Server([*EMULATED, "--models", "32b", "--profile", "a100-0.6b-32b"]) as server:
        assert (server.models, server.router) == (["32b"], "none")
        took = []
        for _ in range(3):
            began = time.monotonic()
            concurrently(lambda seed: ask(server, 20, seed=seed), range(4), 4)
            took.append(time.monotonic() - began)
            if took[-1] < 1.5 * 20 * LARGE_S:
                break
        # Four at once in the steps of one: the curve is flat.
        assert 20 * LARGE_S <= min(took) < 2 * 20 * LARGE_S


@pytest.mark.slow
def test_a_step_longer_than_the_watchdog_is_no_hang(tmp_path: Path) -> None:
    slow = saved(tmp_path, changed(["models", 0, "step", "ms"], 4500))
    arguments = [*EMULATED, "--profile", slow, "--models", "a", "--watchdog-s", "2"]
    with Server(arguments) as server:
        assert ask(server, 1)["choices"][0]["trserve"]["source"] == [0]
        assert "hang" not in server.stderr and "replaced" not in server.stderr


def test_a_bad_profile_is_one_clear_message(tmp_path: Path) -> None:
    bad = saved(tmp_path, changed(["models", 1, "step", "ms"], {"1": -4}))
    done = run_command(["launch", "--port", "0", *EMULATED, "--profile", bad])
    assert done.returncode == 2 and not done.stdout
    assert (
        done.stderr == f"trserve: --profile {bad}: models[1].step.ms: -4; must be above 0 and "
        "at most 60000\n"
    )
