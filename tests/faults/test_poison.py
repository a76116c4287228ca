"""A request that ends the worker that runs it: it is found out and ended, the others go on."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.faults.deadly import IN_PROMPT, IN_RECEIVE, IN_ROUTE
from tests.faults.streams import (
    COMPLETIONS,
    Streams,
    check_equal,
    check_nothing_held,
    request,
    undisturbed,
)
from tests.serverproc import Server, wait_until

ARGS = ["--device", "cpu", "--router", "tests.faults.deadly:DeadlyRouter"]
STREAMS = 6


def body(number: int, **changes: Any) -> dict[str, Any]:
    return request(number, **{"trserve": {"trace": True}, "max_tokens": 500, **changes})


def assert_ends(server: Server, token: int) -> None:
    poison = body(0, prompt=[token, 6, 7, 8])
    del poison["stream_options"]
    answer = server.request("POST", COMPLETIONS, poison)
    assert answer.status == 500, answer.body
    assert answer.json()["error"]["code"] == "worker_crashed"


def restarts(server: Server, expected: int) -> int:
    """How often a worker was started again, by what people are told a moment later."""
    return wait_until(
        lambda: server.stderr.count("it is started again"), lambda n: n >= expected, 5.0
    )


@pytest.mark.parametrize(
    "token", [IN_ROUTE, pytest.param(IN_RECEIVE, marks=pytest.mark.slow)], ids=["route", "receive"]
)
def test_only_the_poison_ends(token: int) -> None:
    bodies = [body(number) for number in range(STREAMS)]
    with Server(ARGS) as server:
        expected = undisturbed(server, bodies)
        streams = Streams(server, bodies)
        streams.until_begun()
        assert_ends(server, token)
        check_equal(streams.join(), expected)
        assert restarts(server, 2) == 2
        check_nothing_held(server)
        # What it did does not count against the workers.
        assert_ends(server, token)
        assert restarts(server, 4) == 4
        check_equal(Streams(server, bodies).join(), expected)


def test_a_prompt_that_ends_only_its_early_reader_harms_nobody() -> None:
    marked = body(0, prompt=[IN_PROMPT, 6, 7, 8], max_tokens=900)
    deaths, due = 0, 4  # three that count would end the server

    def back() -> int:
        return server.stderr.count("is back")

    with Server(ARGS) as server:
        for _ in range(30):  # some are over before their early reader has woken
            (heard,) = Streams(server, [marked]).join()
            heard.check()
            assert set(heard.sources) == {0}
            time.sleep(0.05)
            if (died := server.stderr.count("exit code 79")) > deaths:
                deaths = died
                assert wait_until(back, lambda n, deaths=deaths: n >= deaths, 10.0) == deaths
            if deaths >= due:
                break
        assert deaths == due
        check_nothing_held(server)
