"""Whether a share of tokens is kept while serving, and what counting has to do with it.

The embedded pair under ``--router-config target_share=S``, 64 requests at once, closed loop. One
row for every 2,000 tokens: the share of the other model in all tokens *written* so far (the
server's own counters, read every 20 ms), and in all tokens of the answers *finished* so far. The
two differ although they end alike: long answers are routed most, and end last.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

from bench.common import Row, parser, report, track
from bench.endpoint import counts_of
from tests.serverproc import Server, concurrently
from trserve.demo.grammar import held_out

SETTINGS: Final = (("entropy", 0.1), ("r-stitch", 0.1), ("r2r", 0.07), ("entropy", 0.2))
QUICK_SETTINGS: Final = SETTINGS[:1]
CONCURRENCY: Final = 64
REQUESTS: Final = 400
EVERY_TOKENS: Final = 2000
EVERY_S: Final = 0.02
MAX_TOKENS: Final = 160
SEED: Final = 99

Counts = tuple[int, int]
"""Tokens of the first model, and of the other."""


class Meter:
    """Follows the counters of a server while ``with`` lasts."""

    def __init__(self, server: Server) -> None:
        self.written: list[Counts] = []
        self._server = server
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow)

    def __enter__(self) -> Meter:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._over.is_set():
            page = self._server.request("GET", "/metrics").body
            own, other = counts_of(page, self._server.models, time.monotonic()).tokens
            self.written.append((int(own), int(other)))
            self._over.wait(EVERY_S)


def shares(counts: Sequence[Counts]) -> Iterator[tuple[int, float]]:
    """Tokens, and the other model's share of them, whenever so many more have come."""
    wanted = EVERY_TOKENS
    for own, other in counts:
        if own + other >= wanted:
            yield own + other, other / (own + other)
            wanted += EVERY_TOKENS


def measure(router: str, target: float, requests: int) -> list[Row]:
    """All rows of one setting."""
    finished: list[Counts] = []
    lock = threading.Lock()
    config = ["--router-config", f"target_share={target}", "--threads", "1,1"]
    with Server(["--device", "cpu", "--router", router, *config]) as server:

        def ask(question: str) -> None:
            body: dict[str, Any] = {
                "model": "trserve",
                "messages": [{"role": "user", "content": question}],
                "max_tokens": MAX_TOKENS,
                "temperature": 0,
            }
            reply = server.post("/v1/chat/completions", body, timeout_s=120.0)
            tokens = reply["usage"]["trserve"]["tokens"]
            own, other = (int(tokens.get(name, 0)) for name in server.models)
            with lock:
                before = finished[-1] if finished else (0, 0)
                finished.append((before[0] + own, before[1] + other))

        questions = [problem.question for problem in held_out(requests, SEED)]
        with Meter(server) as meter:
            concurrently(ask, questions, CONCURRENCY)
    counted = {"written": meter.written, "finished": finished}
    return [
        {
            "router": router,
            "target": target,
            "concurrency": CONCURRENCY,
            "counted": how,
            "tokens": tokens,
            "share": share,
            "error_points": 100 * (share - target),
        }
        for how, counts in counted.items()
        for tokens, share in shares(counts)
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure every setting and report."""
    args = parser("target_share", "Whether a share of tokens is kept.").parse_args(argv)
    settings = QUICK_SETTINGS if args.quick else SETTINGS
    rows = [row for setting in track(settings, "settings") for row in measure(*setting, REQUESTS)]
    report("target_share", args, rows, f"target_share, {CONCURRENCY} requests at once")


if __name__ == "__main__":
    main()
