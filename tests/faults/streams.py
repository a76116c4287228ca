"""Many streams at once against a server whose processes are hurt meanwhile, and what they heard."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.procfs import command, descendants
from tests.serverproc import Server, wait_until

COMPLETIONS = "/v1/completions"
LONG_S = 60.0
UNDER_WAY_S = 0.3
"""How long what was committed before a death may take to the client of a busy server."""


def worker_below(root: int, model: int) -> int:
    """The process that runs a model now, somewhere below the process ``root``."""
    marks = ("trserve.workers.main", f"--index={model} ")
    found = [pid for pid in descendants(root) if all(m in command(pid) + " " for m in marks)]
    assert len(found) == 1, f"worker {model} is {len(found)} processes"
    return found[0]


def worker_pid(server: Server, model: int) -> int:
    """The process that runs a model of ``server`` now."""
    return worker_below(server.pid, model)


def kill_workers(server: Server, models: Sequence[int]) -> None:
    """SIGKILL to the processes of ``models``, all at once."""
    for pid in [worker_pid(server, model) for model in models]:
        os.kill(pid, signal.SIGKILL)


def kill_successors(root: int, model: int, times: int) -> None:
    """SIGKILL to the worker of ``model``, and to each successor as soon as there is one."""
    pid = -1
    for _ in range(times):
        pid = _successor(root, model, pid)
        os.kill(pid, signal.SIGKILL)


def _successor(root: int, model: int, before: int) -> int:
    def now() -> int:
        try:
            return worker_below(root, model)
        except AssertionError:
            return before

    pid = wait_until(now, lambda pid: pid != before, LONG_S)
    assert pid != before, f"nobody follows worker {model}"
    return pid


def request(number: int, **changes: Any) -> dict[str, Any]:
    """A long request with many handoffs: greedy, or seeded sampling with penalties, in turns.

    Of few tokens, because each boundary in the cumulative distribution is a chance for the last
    digit of a sum to matter: over the whole vocabulary one of 20,000 draws fell so close to one
    that it went either way without anybody being killed.
    """
    body = {
        "model": "trserve",
        "prompt": [5 + number % 40, 6, 7 + number // 40] * 4,
        "max_tokens": 400,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream_options": {"include_usage": True},
        "trserve": {"trace": True, "router": {"tau": 0.02}},
    }
    if number % 2:
        body |= {"temperature": 0.8, "top_k": 20, "seed": number}
        body |= {"frequency_penalty": 0.1, "logprobs": 2}
    else:
        body |= {"temperature": 0}
    return body | changes


@dataclass
class Heard:
    """What one stream brought: its tokens and what was said of each, its events' times, its end."""

    tokens: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    over: bool = False

    def take(self, event: dict[str, Any]) -> None:
        self.times.append(time.monotonic())
        self.error = event.get("error")
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices", ()):
            self.tokens += choice.get("token_ids") or []
            self.sources += (choice.get("trserve") or {}).get("source", [])
            self.logprobs += (choice.get("logprobs") or {}).get("token_logprobs", [])

    def went_on_after(self, moment: float) -> float | None:
        """Seconds from ``moment`` to the first event that cannot have been under way at it.

        None if the stream was over by then.
        """
        later = (at - moment for at in self.times if at > moment + UNDER_WAY_S)
        return next(later, None)

    def check(self) -> None:
        """The stream is whole, and its counts add up."""
        assert self.over and self.error is None, self.error
        assert len(self.tokens) == len(self.sources) == self.usage["completion_tokens"]
        assert len(self.logprobs) in (0, len(self.tokens))
        by_model = list(self.usage["trserve"]["tokens"].values())
        assert by_model == [self.sources.count(model) for model in range(len(by_model))]


class Streams:
    """Streams of ``bodies``, each read by a thread of its own."""

    def __init__(self, server: Server, bodies: Sequence[dict[str, Any]]) -> None:
        self.heard = [Heard() for _ in bodies]
        self._threads = [
            threading.Thread(target=self._read, args=(server, body, heard), daemon=True)
            for body, heard in zip(bodies, self.heard, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    @staticmethod
    def _read(server: Server, body: dict[str, Any], heard: Heard) -> None:
        for event in server.stream(COMPLETIONS, body, timeout_s=LONG_S):
            heard.take(event)
        heard.over = True

    def until_begun(self) -> None:
        """All have brought something."""
        wait_until(lambda: [bool(h.times) for h in self.heard], all, LONG_S)

    def until_written(self, tokens: int) -> None:
        """Together they have brought ``tokens`` tokens."""
        written = wait_until(
            lambda: sum(len(heard.tokens) for heard in self.heard), lambda n: n >= tokens, LONG_S
        )
        assert written >= tokens

    def join(self) -> list[Heard]:
        """All are over, one way or the other."""
        deadline = time.monotonic() + LONG_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        assert not any(thread.is_alive() for thread in self._threads), "a stream hangs"
        return self.heard


def undisturbed(server: Server, bodies: Sequence[dict[str, Any]]) -> list[Heard]:
    """What ``bodies`` bring when nobody dies."""
    heard = Streams(server, bodies).join()
    for each in heard:
        each.check()
    return heard


def check_equal(heard: Sequence[Heard], expected: Sequence[Heard]) -> None:
    """Token for token and source for source."""
    for number, (one, other) in enumerate(zip(heard, expected, strict=True)):
        one.check()
        assert one.tokens == other.tokens, f"stream {number}"
        assert one.sources == other.sources, f"stream {number}"
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-3), f"stream {number}"


def check_nothing_held(server: Server) -> None:
    """No request is left and every KV block is free or cached."""

    def state() -> dict[str, Any]:
        report: dict[str, Any] = server.request("GET", "/health").json()
        return report

    def settled(report: dict[str, Any]) -> bool:
        busy = [model["running"] + model["pending"] for model in report["models"]]
        held = [m["total_blocks"] - m["free_blocks"] - m["cached_blocks"] for m in report["models"]]
        return not any([*report["requests"].values(), *busy, *held])

    report = wait_until(state, settled, 5.0)  # a new worker says within a second what it has
    assert settled(report), report
    for model in report["models"]:
        assert model["kv_repairs"] == 0


class Readiness:
    """What /readyz said, polled."""

    EVERY_S = 0.05

    def __init__(self, server: Server) -> None:
        self._server = server
        self._stop = threading.Event()
        self.seen: list[tuple[float, int]] = []
        self._thread = threading.Thread(target=self._poll, daemon=True)
        self._thread.start()

    def _poll(self) -> None:
        while not self._stop.wait(self.EVERY_S):
            status = self._server.request("GET", "/readyz", timeout_s=LONG_S).status
            self.seen.append((time.monotonic(), status))

    def first(self, status: int, *, after: float) -> float:
        """Seconds from ``after`` to the first answer that was ``status``; bounded."""

        def found() -> list[float]:
            return [at - after for at, s in tuple(self.seen) if at > after and s == status]

        times = wait_until(found, bool, LONG_S)
        assert times, f"never {status}"
        return times[0]

    def close(self) -> None:
        self._stop.set()
        self._thread.join(LONG_S)


@contextmanager
def watched(server: Server) -> Iterator[Readiness]:
    readiness = Readiness(server)
    try:
        yield readiness
    finally:
        readiness.close()
