"""However often strangers knock, the log stays readable, and says how much it left out."""

from __future__ import annotations

import logging

import pytest
import zmq

from trserve import limited_log
from trserve.edge.curve import Gatekeeper, KeyPair, ServerKeys
from trserve.limited_log import EVERY_S, MOST_LINES, LimitedLog


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return found


def test_a_minute_has_so_many_lines_and_the_next_says_how_many_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = LimitedLog(logging.getLogger("test"))
    for number in range(MOST_LINES + 5):
        log.warning(number / 10, "%d", number)
    assert lines(caplog) == [str(number) for number in range(MOST_LINES)]
    log.warning(EVERY_S, "later")
    assert lines(caplog) == ["5 more lines like those before were left out", "later"]
    log.warning(2 * EVERY_S, "later still")
    assert lines(caplog) == ["later still"]


def test_a_line_at_a_time_is_never_left_out(caplog: pytest.LogCaptureFixture) -> None:
    log = LimitedLog(logging.getLogger("test"))
    every = EVERY_S / MOST_LINES
    for number in range(5 * MOST_LINES):
        log.warning(number * every, "%d", number)
    assert lines(caplog) == [str(number) for number in range(5 * MOST_LINES)]


def test_strangers_who_knock_all_the_time(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limited_log, "MOST_LINES", 3)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    gate = Gatekeeper(context, ServerKeys(KeyPair.new(), {}))
    knock = [b"1.0", b"1", b"edge", b"192.0.2.7", b"", b"CURVE", b"k" * 32]
    for knocks in range(500):
        assert gate._decide(knock, knocks / 100)[2] == b"400"
    assert lines(caplog) == [f"192.0.2.7 is refused: its key {'6b' * 8} is not in --edge-keys"] * 3
    gate._clients = {b"k" * 32: "home"}
    gate.bar((b"k" * 32).hex(), 1e9)
    gate._decide(knock, 5.0)
    assert "home sent frames that are none" in lines(caplog)[0], "strangers leave room for it"
    gate.close()
    context.destroy(linger=0)
