"""Two servers that only a bad network joins, streams across it, and what each of them heard.

The home server has the SLM, the far one the LLM; between them stands ``bench.netproxy``. Every
process of the far side may be started behind a prefix, such as one that enters another network
namespace. Knows no reference.
"""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.edge_trserve import free_port
from bench.netproxy import NetProxy
from bench.netproxy_weather import Weather
from tests.golden.random_pair import RandomPair
from tests.serverproc import Server, run_command, wait_until

COMMON = ("--device", "cpu", "--dtype", "float32", "--threads", "1,1")
LONG_S = 120.0


@dataclass(frozen=True)
class Way:
    """How bad the network is, and how much goes over it.

    ``outage_s`` begins when all streams together have brought ``before`` tokens; streams begin
    ``apart_s`` after each other.
    """

    weather: Weather
    outage_s: float
    streams: int
    tokens: int
    before: int
    apart_s: float
    timeout_s: float


BRIEF = Way(
    # With this seed every connection has a stall within its first 45 packets.
    Weather(delay_ms=5, jitter_ms=2, stall_chance=0.01, stall_ms=40, seed=22),
    outage_s=1.0,
    streams=3,
    tokens=40,
    before=24,
    apart_s=0.3,
    timeout_s=0.3,
)
ISSUE = Way(
    Weather(delay_ms=85, jitter_ms=10, stall_chance=0.01, stall_ms=200, seed=1),
    outage_s=10.0,
    streams=12,
    tokens=120,
    before=200,
    apart_s=1.5,
    timeout_s=2.0,
)


@dataclass
class Heard:
    """What one stream brought."""

    tokens: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    alone: list[bool] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    over: bool = False

    def take(self, event: dict[str, Any]) -> None:
        self.usage = event.get("usage") or self.usage
        for choice in event["choices"]:
            own = choice.get("trserve") or {"source": [], "alone": []}
            self.tokens += choice.get("token_ids") or []
            self.sources += own["source"]
            self.alone += own["alone"]
            self.times += [time.monotonic()] * len(own["source"])
            self.reasons += [choice["finish_reason"]] if choice["finish_reason"] else []

    outage: tuple[float, float] = (0.0, 0.0)
    """When the network went, and when it came back."""

    @property
    def longest_gap_s(self) -> float:
        """Between two tokens."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return max((b - a for a, b in pairs), default=0.0)

    @property
    def alone_in_outage(self) -> int:
        """Marked tokens that came before the network was back."""
        began, ended = self.outage
        pairs = zip(self.times, self.alone, strict=True)
        return sum(alone and began < at < ended for at, alone in pairs)

    def check(self) -> None:
        """It is whole: one source and one mark a token, one finish reason, counts that add up."""
        assert self.over
        assert len(self.tokens) == len(self.sources) == len(self.alone)
        assert len(self.reasons) == 1
        assert self.usage["completion_tokens"] == len(self.tokens)
        written = list(self.usage["trserve"]["tokens"].values())
        assert written == [self.sources.count(model) for model in range(len(written))]


@dataclass
class Far:
    """The far server, and the way to it."""

    pair: RandomPair
    server: Server
    proxy: NetProxy
    keys: Sequence[str]
    shared: Sequence[str]

    @contextmanager
    def home(self, number: int, *flags: str) -> Iterator[Server]:
        """A home server with the key file ``number``."""
        models = ["--models", f"{self.pair.slm},{self.pair.llm}@{self.proxy.address}"]
        keys = ["--edge-keys", self.keys[number]]
        with Server([*models, *keys, *COMMON, *self.shared, *flags]) as server:
            yield server


@contextmanager
def far_side(
    pair: RandomPair,
    weather: Weather,
    shared: Sequence[str],
    *,
    homes: int = 2,
    host: str = "127.0.0.1",
    prefix: Sequence[str] = (),
) -> Iterator[Far]:
    """The far server at ``host``, with key files for so many homes; ``shared`` is the router."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="trs-far-")))
        keys = [str(folder / f"home{number}.keys") for number in range(homes)]
        for each in keys:
            made = run_command(["keys", "edge", str(folder / "far.keys"), each])
            assert made.returncode == 0, made.stderr
        port = free_port()
        listens = ["--edge-listen", f"{host}:{port}", "--edge-keys", str(folder / "far.keys")]
        server = Server(["--models", str(pair.llm), *listens, *COMMON, *shared])
        server.COMMAND = (*prefix, *Server.COMMAND)
        stack.enter_context(server)
        proxy = stack.enter_context(NetProxy((host, port), weather))
        yield Far(pair, server, proxy, keys, shared)


def listen(
    server: Server, bodies: Sequence[dict[str, Any]], way: Way, proxy: NetProxy
) -> list[Heard]:
    """All of ``bodies``, one after the other begun, with an outage amid them."""
    heard = [Heard() for _ in bodies]
    broken = threading.Event()

    def break_once() -> None:
        if sum(len(each.tokens) for each in heard) >= way.before and not broken.is_set():
            broken.set()
            proxy.outage(way.outage_s)
            began = time.monotonic()
            for each in heard:
                each.outage = began, began + way.outage_s

    def read(number: int) -> None:
        time.sleep(number * way.apart_s)
        for event in server.stream("/v1/completions", bodies[number], timeout_s=LONG_S):
            heard[number].take(event)
        heard[number].over = True

    with ThreadPoolExecutor(len(bodies)) as pool:
        done = [pool.submit(read, number) for number in range(len(bodies))]
        with contextlib.suppress(StopIteration):
            while not all(each.done() for each in done):
                break_once()
                time.sleep(0.005)
        for each in done:
            each.result()
    assert broken.is_set(), "the streams were over before the outage"
    return heard


def until_reachable(server: Server) -> None:
    """The far model can be reached again."""
    found = wait_until(
        lambda: server.request("GET", "/health").json(), lambda r: r["status"] == "ok", LONG_S
    )
    assert found["status"] == "ok", found
