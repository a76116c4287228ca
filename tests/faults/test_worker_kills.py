"""Workers that are killed at any time: every stream goes on, and is what it would have been."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Sequence
from typing import Any

import pytest

from tests.faults.streams import (
    Heard,
    Streams,
    check_equal,
    check_nothing_held,
    kill_successors,
    kill_workers,
    request,
    undisturbed,
    watched,
)
from tests.serverproc import Server

UNREADY_S = 1.0
GOES_ON_S = {1: 5.0, 2: 15.0}
"""Within how many seconds of the kill, by the number of workers that were killed."""
USUAL_START_S = 3.5
"""Start of a server on the two cores that these limits are for; a slower one has more time."""

VICTIMS = {"slm": (0,), "llm": (1,), "both": (0, 1)}


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_streams_survive_their_workers(seed: int) -> None:
    survive(seed, streams=12)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 120))
def test_sixty_four_streams_survive_their_workers(seed: int) -> None:
    survive(seed, streams=64)


@pytest.mark.parametrize("model", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_whoever_waits_sees_the_model_again(model: int) -> None:
    """Five deaths in a row, four of them while loading, with --on-peer-loss wait."""
    bodies = [request(number) for number in range(6)]
    with Server(["--device", "cpu", "--on-peer-loss", "wait"]) as server:
        expected = undisturbed(server, bodies)
        streams = Streams(server, bodies)
        streams.until_begun()
        kill_successors(server.pid, model, times=5)
        check_equal(streams.join(), expected)
        check_nothing_held(server)


def test_a_server_that_drains_gets_its_worker_back() -> None:
    """SIGTERM a moment after the death: open streams still finish."""
    bodies = [request(number) for number in range(4)]
    with Server(["--device", "cpu"]) as server:
        expected = undisturbed(server, bodies)
        streams = Streams(server, bodies)
        streams.until_begun()
        kill_workers(server, [0])
        server.send_signal(signal.SIGTERM)
        check_equal(streams.join(), expected)
        assert server.wait() == 0
        assert not server.wait_gone()


def survive(seed: int, *, streams: int) -> None:
    """One server; each worker dies twice, which is within what a minute allows.

    A kill comes when the streams have brought a random share of their tokens, so that it finds them
    open however busy the machine is.
    """
    dice = random.Random(seed)
    bodies = [request(number) for number in range(streams)]
    kinds = list(VICTIMS)
    dice.shuffle(kinds)
    began = time.monotonic()
    with Server(["--device", "cpu"]) as server:
        slowness = max(1.0, (time.monotonic() - began) / USUAL_START_S)
        expected = undisturbed(server, bodies)
        for kind in kinds:
            share = dice.uniform(0.0, 0.8)
            kill_once(server, bodies, VICTIMS[kind], expected, share, slowness)
        assert server.stop() == 0
        assert not server.wait_gone()


def kill_once(
    server: Server,
    bodies: Sequence[dict[str, Any]],
    victims: Sequence[int],
    expected: Sequence[Heard],
    share: float,
    slowness: float,
) -> None:
    with watched(server) as readiness:
        streams = Streams(server, bodies)
        streams.until_begun()
        streams.until_written(int(share * sum(len(heard.tokens) for heard in expected)))
        killed = time.monotonic()
        kill_workers(server, victims)
        unready = readiness.first(503, after=killed)
        ready = readiness.first(200, after=killed + unready)
        heard = streams.join()
    check_equal(heard, expected)
    went_on = [s for h in heard if (s := h.went_on_after(killed)) is not None]
    assert went_on, "the kill came too late to test anything"
    print(
        f"kill of {victims} at {share:.0%}: unready after {unready:.2f} s, ready again "
        f"{ready:.2f} s later, {len(went_on)} streams went on after {max(went_on):.2f} s; "
        f"this machine takes {slowness:.1f} times the usual"
    )
    assert unready <= UNREADY_S * slowness
    assert max(went_on) <= GOES_ON_S[len(victims)] * slowness
    check_nothing_held(server)
