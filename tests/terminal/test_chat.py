"""`trserve chat` in a pseudo-terminal and in a pipe, and who wrote which piece."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from tests.serverproc import Server, server_env
from tests.terminal.pseudo_terminal import CTRL_C, CTRL_D, PseudoTerminal
from trserve.terminal.chat import shown, style_of
from trserve.terminal.conversation import Piece, split

QUESTION = "Eva has 71 pencils. Then she gives away 15. How many pencils does Eva have now?"
BLUE, ORANGE = "38;5;74", "38;5;172"
UNDERLINED = "\x1b[4;"


def chat(server: Server, *args: str, **env: str) -> PseudoTerminal:
    return PseudoTerminal(["chat", "--url", server.url, "--temperature", "0", *args], env)


def piped(server: Server, text: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "trserve", "chat", "--url", server.url, "--temperature", "0"],
        input=text,
        capture_output=True,
        text=True,
        timeout=60,
        env=server_env(tmp_path),
    )


def answer_of(server: Server, **more: object) -> str:
    body = {"model": "trserve", "messages": [{"role": "user", "content": QUESTION}], **more}
    done = server.post("/v1/chat/completions", {**body, "temperature": 0})
    return done["choices"][0]["message"]["content"]


def test_a_conversation(server, tmp_path):
    saved = tmp_path / "chat.json"
    with chat(server) as terminal:
        terminal.expect("Ctrl-D ends\n> ")
        terminal.answer(QUESTION + "\n")
        text = terminal.expect("tokens/s")
        assert answer_of(server) in text.replace("\n", "")
        assert "share" in text
        assert UNDERLINED in terminal.raw, "the second model's cue, for who sees no colour"
        terminal.answer("/threshold 2\n")
        terminal.expect("must be 0 to 1")
        terminal.answer("/threshold 0\n")
        terminal.expect("tau = 0 in this chat")
        terminal.answer("/clear\n")
        terminal.expect("a new conversation")
        terminal.answer(QUESTION + "\n")
        terminal.expect("tokens/s")
        terminal.answer("/router default\n")
        terminal.expect("tau = 0.06:")
        terminal.answer("/stats\n")
        terminal.expect("2 answers of this chat")
        terminal.answer("/sat\n")
        terminal.expect("no command /sat; /help")
        terminal.answer("/help\n")
        terminal.expect("/save FILE")
        terminal.answer(f"/save {saved}\n")
        terminal.expect("2 answers with their traces")
        # The arrow brings back what was typed before, as everywhere.
        terminal.answer("\x1b[A\n")
        terminal.expect("is there already")
        assert terminal.end_by(CTRL_D) == 0
        assert "Traceback" not in terminal.text
    first, second = json.loads(saved.read_text())["answers"]
    assert first["router"] == {}
    assert first["answer"] == answer_of(server)
    assert "".join(piece["text"] for piece in first["pieces"]) == first["answer"]
    assert {piece["model"] for piece in first["pieces"]} == {0, 1}
    assert any(piece["score"] is not None for piece in first["pieces"])
    assert second["router"] == {"tau": 0.0}
    assert second["answer"] == answer_of(server, trserve={"router": {"tau": 0.0}})
    assert second["usage"]["trserve"]["share"] > first["usage"]["trserve"]["share"]


def test_no_colour_is_plain(server):
    with chat(server, "--only", "small", NO_COLOR="1") as terminal:
        terminal.expect("> ")
        terminal.answer(QUESTION + "\n")
        terminal.expect("tokens/s")
        assert "small" in terminal.text
        for style in (BLUE, ORANGE, "\x1b[4m", UNDERLINED, "\x1b[2m"):
            assert style not in terminal.raw
        terminal.answer("/quit\n")
        assert terminal.wait() == 0


class Endless(BaseHTTPRequestHandler):
    """A server whose answers never end, or, asked for an error, end with one."""

    left: ClassVar[threading.Event]

    def do_GET(self) -> None:
        model = {"name": "only", "status": "up"}
        router = {"name": "none", "parameters": []}
        about = {"version": "0", "served_models": ["x"], "models": [model], "router": router}
        self._begin("application/json", json.dumps(about).encode())

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._begin("text/event-stream", b"")
        choice = {"delta": {"content": "word "}, "trserve": {"source": [0]}}
        event = f"data: {json.dumps({'choices': [choice]})}\n\n".encode()
        if asked["messages"][-1]["content"] == "fail":
            self.wfile.write(event + b'data: {"error": {"message": "a model is lost"}}\n\n')
            return
        try:
            while True:
                self.wfile.write(event)
                time.sleep(0.02)
        except OSError:
            self.left.set()

    def _begin(self, kind: str, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Nobody reads it."""


@pytest.fixture
def endless():
    Endless.left = threading.Event()
    with ThreadingHTTPServer(("127.0.0.1", 0), Endless) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{httpd.server_port}"
        httpd.shutdown()


def test_ctrl_c_stops_an_answer_and_then_the_chat(endless):
    with PseudoTerminal(["chat", "--url", endless]) as terminal:
        terminal.expect("> ")
        terminal.answer("hello\n")
        terminal.expect("word word word")
        terminal.send(CTRL_C)
        terminal.expect("stopped; Ctrl-C once more ends the chat")
        assert Endless.left.wait(10), "the server is left, so that it stops too"
        terminal.answer("fail\n")
        terminal.expect("trserve: a model is lost")
        assert terminal.end_by(CTRL_C) == 0
        assert "Traceback" not in terminal.text


def test_a_pipe_gets_the_answer_alone(server, tmp_path):
    done = piped(server, f"/only tiny\n{QUESTION}\n", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == answer_of(server, trserve={"only": "tiny"}) + "\n"
    assert "tiny writes everything" in done.stderr


def test_a_pipe_whose_words_are_refused(server, tmp_path):
    done = piped(server, "/only nobody\n", tmp_path)
    assert done.returncode == 1
    assert "no model nobody; there are: tiny, small" in done.stderr
    assert done.stdout == ""


TRACE = {"source": [0, 1, 0], "score": [0.1, 0.2, 0.3], "handoff_us": [None, 7, 9]}


def test_an_event_of_several_writers_is_taken_apart():
    found = split("ab cd", TRACE, ["a", "b", " cd"], None)
    assert found == [Piece("a", 0, 0.1), Piece("b", 1, 0.2, 7), Piece(" cd", 0, 0.3, 9)]


@pytest.mark.parametrize(
    ("text", "tokens", "expected"),
    [
        ("ab", ["a", "�", "�"], [("a", 0), ("b", 0)]),
        ("xyz", ["a", "b", "c"], [("xyz", 0)]),
        ("ab", [], [("ab", 0)]),
    ],
)
def test_no_text_is_lost_where_tokens_are_no_texts(text, tokens, expected):
    assert [(p.text, p.model) for p in split(text, TRACE, tokens, 1)] == expected


def test_text_without_tokens_is_the_last_writers():
    assert split("late", {}, [], 1) == [Piece("late", 1)]


def test_models_differ_by_more_than_colour():
    styles = [style_of(Piece("x", model)) for model in range(4)]
    assert len({(s.underline, s.italic, s.bold) for s in styles}) == 4
    assert style_of(Piece("x", 0, thought=True)).dim


def test_a_model_gives_a_terminal_no_orders():
    assert shown("a\x1b[2Jb\x07c\nd\te") == "a�[2Jb�c\nd\te"
