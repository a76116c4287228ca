"""trserve's way in the edge study: two servers, joined by the tcp link through the proxy.

The home server has the SLM and the clients, the cloud server the LLM; what is on the wire is read
off the proxy. Knows servers and streams; nothing of what a model or a router decides.
"""

from __future__ import annotations

import json
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.edge_measured import Answer
from bench.netproxy import NetProxy
from bench.netproxy_weather import Weather
from tests.serverproc import Server, run_command
from trserve.places import EDGE

LLM: Final = "llm"
NO_SERVICE_MS: Final = 0.001
"""A step of an emulated device takes some time."""

_ROOT: Final = Path(__file__).parent.parent
_ENVIRONMENT: Final = {"PYTHONPATH": str(_ROOT)}
"""The workers import the study's router."""

_READY_TIMEOUT_S: Final = 180.0
_TIMEOUT_S: Final = 900.0


def write_profile(folder: Path, service_s: float) -> Path:
    """A profile of an LLM that takes ``service_s`` a token, however long the row, and of the entry
    model that stands at the home; the tokens are made up."""
    rows = 1 << 17
    step = {"ms": max(1e3 * service_s, NO_SERVICE_MS), "source": "chosen"}
    prefill = {"tokens_per_s": 1e9, "free_tokens": rows, "source": "chosen"}
    models = [{"name": name, "step": step, "prefill": prefill} for name in (EDGE, LLM)]
    content = {"format": 1, "name": "cloud", "models": models, "max_model_len": 8192}
    file = folder / f"cloud-{service_s:g}.json"
    file.write_text(json.dumps(content))
    return file


def free_port() -> int:
    """A port of the loopback interface that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


@dataclass(frozen=True)
class Pair:
    """Flags of the two servers, beside those of their link.

    ``home`` names the SLM, ``cloud`` the LLM; ``shared`` is the router, which both must have.
    """

    slm: str
    llm: str
    home: Sequence[str]
    cloud: Sequence[str]
    shared: Sequence[str]


@dataclass(frozen=True)
class Linked:
    """Both servers are up, and the proxy between them."""

    home: Server
    cloud: Server
    proxy: NetProxy

    def ask(self, body: Mapping[str, Any]) -> Answer:
        """One streamed answer of the home server."""
        answer = Answer()
        began = time.perf_counter()
        usage: dict[str, Any] = {}
        asked = {**body, "return_token_ids": True, "stream_options": {"include_usage": True}}
        for event in self.home.stream("/v1/completions", asked, timeout_s=_TIMEOUT_S):
            now = time.perf_counter() - began
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                ids = choice.get("token_ids") or []
                answer.token_ids += ids
                answer.times += [now] * len(ids)
                answer.text += choice.get("text") or ""
        own = usage["trserve"]
        answer.routed = own["tokens"].get(self.home.models[-1], 0)
        answer.visits = (own["handoffs"] + 1) // 2  # the last one may end there
        answer.drawn = answer.tokens - answer.routed + answer.visits
        return answer

    def ask_alone(self, body: Mapping[str, Any]) -> Answer:
        """The same with its bytes on the wire, which nobody else may use meanwhile."""
        self.proxy.log()
        before = self._frames()
        answer = self.ask(body)
        wire = after_first_contact(self.proxy.log(), 2 * answer.visits)
        answer.bytes, answer.handoffs = wire
        counts = zip(self._frames(), before, strict=True)
        answer.frame_bytes, answer.frames = (after - earlier for after, earlier in counts)
        return answer

    def _frames(self) -> tuple[int, int]:
        """Bytes and number of the link's handoffs and answers so far, first contacts apart."""
        found = self.home.request("GET", "/health").json()["models"][-1]
        handoffs, answers = found["link_handoffs"], found["link_answers"]
        return found["link_handoff_bytes"] + found["link_answer_bytes"], handoffs + answers


def after_first_contact(log: Sequence[tuple[float, bool, int]], handoffs: int) -> tuple[int, int]:
    """Bytes and handoffs behind the first visit: what came up to the first answer is left out.

    Everything on the wire counts: frames, their encryption, heartbeats, the session's end.
    """
    if handoffs <= 2:
        return 0, 0
    first = next((at for at, (_, up, _) in enumerate(log) if not up), len(log))
    return sum(size for _, _, size in log[first + 1 :]), handoffs - 2


@contextmanager
def linked(pair: Pair, weather: Weather, more: Sequence[str] = ()) -> Iterator[Linked]:
    """Start both; ``more`` are flags of the home server, such as ``--on-peer-loss``."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="trs-edge-")))
        keys = [str(folder / name) for name in ("cloud.keys", "home.keys")]
        made = run_command(["keys", "edge", *keys])
        if made.returncode:
            raise RuntimeError(made.stderr)
        port = free_port()
        listens = ["--edge-listen", f"127.0.0.1:{port}", "--edge-keys", keys[0]]
        cloud = _server(["--models", pair.llm, *listens, *pair.cloud, *pair.shared])
        stack.enter_context(cloud)
        proxy = stack.enter_context(NetProxy(("127.0.0.1", port), weather))
        dials = ["--models", f"{pair.slm},{pair.llm}@{proxy.address}", "--edge-keys", keys[1]]
        home = stack.enter_context(_server([*dials, *pair.home, *pair.shared, *more]))
        yield Linked(home, cloud, proxy)
        home.stop()
        cloud.stop()


def _server(arguments: Sequence[str]) -> Server:
    return Server(arguments, _ENVIRONMENT, ready_timeout_s=_READY_TIMEOUT_S)
