"""A server that takes ids and does as it is told, and how to wait for a cloud in front of it."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from trserve.waiting import wait_readable

LIMIT_S = 10.0


class Stub(ThreadingHTTPServer):
    """Answers each call with the next of ``script``: a body, with status and headers, or what makes
    one."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.models = {"data": [{"id": "big", "owned_by": "vllm", "max_model_len": 128}]}
        self.script = []
        self.asked = []
        self.connections = set()
        self.headers = []
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Stub

    def log_message(self, *args):
        """Nobody reads it."""

    def do_GET(self):
        self.reply(self.server.models)

    def do_POST(self):
        self.body = body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, body))
        self.server.headers.append(dict(self.headers))
        self.server.connections.add(self.client_address)
        self.reply(self.server.script.pop(0))

    def reply(self, told):
        if callable(told):
            told = told(self)
        if told is None:
            self.close_connection = True
            return
        status, content, *more = told if isinstance(told, tuple) else (200, told)
        body = json.dumps(content).encode()
        self.send_response(status)
        for name, value in (more[0] if more else {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def wrote(*ids):
    return {"choices": [{"token_ids": list(ids)}]}


def wait(cloud, done):
    """Answers until ``done(answers)``; the descriptor says when to look, as for an agent."""
    answers, deadline = [], time.monotonic() + LIMIT_S
    while not done(answers):
        assert time.monotonic() < deadline, cloud.reason
        wait_readable(cloud.fd, min(0.2, cloud.due_s(time.monotonic())))
        answers += cloud.poll(time.monotonic())
    return answers


def answers_of(cloud, count):
    return wait(cloud, lambda answers: len(answers) >= count)


def answer_of(cloud):
    (answer,) = answers_of(cloud, 1)
    return answer
