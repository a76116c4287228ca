"""`trserve top` in a pseudo-terminal, once, and without a server."""

from __future__ import annotations

import json
import threading

import pytest

from tests.serverproc import Server, run_command
from tests.terminal.pseudo_terminal import CTRL_C, CTRL_D, PseudoTerminal
from trserve.terminal.top_view import sparkline

QUESTION = "Eva has 71 pencils. Then she gives away 15. How many pencils does Eva have now?"
BODY = {"model": "trserve", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}


@pytest.fixture
def busy(server: Server):
    """Somebody asks one question after the other."""
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            server.post("/v1/chat/completions", BODY)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    yield
    stop.set()
    thread.join(30)
    assert not thread.is_alive()


def test_the_screen_and_its_keys(server, busy):
    with PseudoTerminal(["top", "--url", server.url]) as terminal:
        # Two looks at least: a first one has nothing to compare with.
        shown = terminal.expect("threshold ")
        for words in ("serving", "tiny", "small", "r-stitch", "tau=", "between tokens", "tokens/s"):
            assert words in shown
        assert "\x1b[?1049h" in terminal.raw, "a screen of its own"
        terminal.send("p")
        terminal.expect("PAUSED")
        terminal.send("?")
        terminal.expect("tokens not written by the first model")
        terminal.send("q")
        assert terminal.wait() == 0
        assert "\x1b[?1049l" in terminal.raw, "and back"
        assert "Traceback" not in terminal.text


def test_ctrl_c_ends_it_cleanly(server):
    with PseudoTerminal(["top", "--url", server.url]) as terminal:
        terminal.expect("q quit")
        terminal.send(CTRL_C)
        assert terminal.wait() == 0
        assert "Traceback" not in terminal.text


def test_no_colour_and_ctrl_d(server):
    with PseudoTerminal(["top", "--url", server.url], env={"NO_COLOR": "1"}) as terminal:
        terminal.expect("r-stitch")
        terminal.send(CTRL_D)
        assert terminal.wait() == 0
        assert "\x1b[32m" not in terminal.raw
        assert "\x1b[36m" not in terminal.raw
        assert "Traceback" not in terminal.text


def test_without_a_server_it_waits_for_one():
    with PseudoTerminal(["top", "--url", "http://127.0.0.1:9"]) as terminal:
        terminal.expect("trying again")
        terminal.send("q")
        assert terminal.wait() == 0


def test_once_as_json(server, busy):
    done = run_command(["top", "--url", server.url, "--once", "--json"])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [model["name"] for model in found["stats"]["models"]] == ["tiny", "small"]
    assert found["stats"]["tokens_per_s"] > 0
    assert found["stats"]["interval_s"] > 0.5
    assert found["about"]["router"]["name"] == "r-stitch"


def test_once_as_text_is_no_screen(server):
    done = run_command(["top", "--url", server.url])
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert "r-stitch" in done.stdout
    assert "tiny" in done.stdout


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["--url", "http://127.0.0.1:9"], 1, "Connection refused"),
        (["--url", "ftp://127.0.0.1"], 2, "--url"),
        (["--url", "http://127.0.0.1:x"], 2, "--url"),
    ],
)
def test_what_is_wrong_is_one_line(args, code, words):
    done = run_command(["top", "--once", *args])
    assert done.returncode == code
    (line,) = done.stderr.strip().splitlines()
    assert words in line
    assert done.stdout == ""


def test_sparklines():
    assert sparkline([]) == ""
    assert sparkline([0, 0]) == "▁▁"
    assert sparkline([0, 5, 10]) == "▁▅█"
