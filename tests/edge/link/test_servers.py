"""Two real servers over loopback: golden answers, processes killed, hosts that are refused."""

from __future__ import annotations

import copy
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.golden.compare import Answer, assert_golden
from tests.golden.completions import PATH, body_of
from tests.golden.pairs import LARGE_SEED
from tests.golden.random_pair import (
    build_random_pair,
    byte_tokenizer,
    random_prompts,
    write_random_model,
)
from tests.golden.reference import Setting
from tests.golden.routed import RoutedReference
from tests.golden.rules import Mixture
from tests.golden.test_routers import answer_of, asked, routed
from tests.procfs import command
from tests.serverproc import Server, StartFailedError, concurrently, wait_until
from trserve.edge.keys_command import make_files

COMMON = ("--device", "cpu", "--dtype", "float32", "--threads", "1,1", "--link-heartbeat-s", "0.3")
WEIGHTS = (0.6, 0.4)
MIXTURE = ("--router", "me", "--router-config", "weights=0.6/0.4")
AGENT, PORT, WORKER = "edge.agent_main", "edge.port_main", "workers.main"


@dataclass
class Pair:
    """A checkpoint for each host, the keys of both, and a port."""

    folder: Path
    reference: RoutedReference
    slm: Path
    llm: Path
    port: int

    def far(self, *args: str) -> Server:
        listens = ["--edge-listen", f"127.0.0.1:{self.port}", "--edge-keys", self.key("far")]
        return Server(["--models", str(self.llm), *listens, *COMMON, *args])

    def home(self, *args: str, slm: Path | None = None, key: str = "home") -> Server:
        models = f"{slm or self.slm},{self.llm}@127.0.0.1:{self.port}"
        return Server(["--models", models, "--edge-keys", self.key(key), *COMMON, *args])

    def key(self, name: str) -> str:
        return str(self.folder / f"{name}.keys")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("link")
    built = build_random_pair(folder, seed=3)
    make_files(folder / "far.keys", folder / "home.keys", "home")
    make_files(folder / "other.keys", folder / "stranger.keys", "stranger")
    reference = RoutedReference(built.slm, built.llm)
    return Pair(folder, reference, built.slm, built.llm, free_port())


@pytest.fixture
def apart(pair: Pair) -> Pair:
    """``pair`` with a port of its own."""
    return replace(pair, port=free_port())


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@contextmanager
def both(pair: Pair, shared: Sequence[str], *flags: str) -> Iterator[tuple[Server, Server]]:
    """The home and the far server."""
    with pair.far(*shared) as far, pair.home(*shared, *flags) as home:
        yield home, far


@pytest.fixture(scope="module")
def joined(pair: Pair) -> Iterator[tuple[Server, Server]]:
    with both(pair, MIXTURE, "--on-peer-loss", "wait") as servers:
        yield servers


# -- golden answers ------------------------------------------------------------------------------


def test_each_token_by_whoever_is_drawn(pair: Pair, joined: tuple[Server, Server]) -> None:
    """Every token counts, and the first is often the other host's."""
    home, _ = joined
    jobs = asked(8)
    traces = [pair.reference.run(prompt, s, Mixture(WEIGHTS)) for _, prompt, s in jobs]

    def one(at: int) -> dict[str, Any]:
        _, prompt, setting = jobs[at]
        body = body_of(prompt, setting, home.models)
        del body["trserve"]["router"]
        found: dict[str, Any] = home.post(PATH, body, timeout_s=60.0)
        return found

    answers = [answer_of(response) for response in concurrently(one, range(len(jobs)), 8)]
    labels = [f"prompt {index}" for index, *_ in jobs]
    assert_golden(zip(labels, traces, answers, strict=True))
    link = home.request("GET", "/health").json()["models"][1]
    assert link["link_handoffs"] > 20
    frames = link["link_handoff_bytes"] + link["link_answer_bytes"]
    assert frames / link["link_handoffs"] <= 200


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["r-stitch", "r2r", "step-leader", "random", "me 2", "entropy", "co-llm"]
)
def test_a_router_is_its_definition_across_two_hosts(
    apart: Pair, name: str, tmp_path: Path
) -> None:
    router = routed(name, apart.reference, apart.reference, tmp_path)
    with both(apart, router.args) as (home, _):
        jobs = []
        for case in router.cases:
            for index, prompt, setting in asked(12):
                if case.entry is not None:
                    setting = Setting(**{**vars(setting), "entry": case.entry})
                rule, named = case.rule(), case.entry is not None
                trace = apart.reference.run(prompt, setting, rule, named=named)
                jobs.append((f"{name} {case.own}, prompt {index}", prompt, case.own, trace))

        def one(at: int) -> dict[str, Any]:
            _, prompt, own, trace = jobs[at]
            body = body_of(prompt, trace.setting, home.models)
            body["trserve"]["router"] = own
            found: dict[str, Any] = home.post(PATH, body, timeout_s=120.0)
            return found

        answers = [answer_of(response) for response in concurrently(one, range(len(jobs)), 8)]
        labels, traces = [job[0] for job in jobs], [job[3] for job in jobs]
        assert_golden(zip(labels, traces, answers, strict=True))


@pytest.mark.slow
def test_three_models_two_of_them_at_the_far_host(apart: Pair) -> None:
    """Two link agents over two connections; what passes between the two there stays there."""
    third = apart.folder / "third"
    write_random_model(third, 1, random_prompts(16, Random("third")), seed=4)
    weights = (0.5, 0.3, 0.2)
    shared = ["--router", "me", "--router-config", "weights=0.5/0.3/0.2"]
    threads = ["--device", "cpu", "--dtype", "float32"]
    at = f"127.0.0.1:{apart.port}"
    listens = ["--edge-listen", at, "--edge-keys", apart.key("far")]
    there = ["--models", f"slm@edge,{apart.llm},{third}", *listens, *threads, *shared]
    models = f"{apart.slm},{apart.llm}@{at},{third}@{at}"
    here = ["--models", models, "--edge-keys", apart.key("home"), *threads, *shared]
    reference = RoutedReference(apart.slm, apart.llm, third)
    jobs = asked(12)
    traces = [reference.run(prompt, s, Mixture(weights)) for _, prompt, s in jobs]
    with Server(there), Server(here) as home:

        def one(at: int) -> Answer:
            _, prompt, setting = jobs[at]
            body = body_of(prompt, setting, home.models)
            del body["trserve"]["router"]
            return answer_of(home.post(PATH, body, timeout_s=60.0))

        answers = concurrently(one, range(len(jobs)), 8)
    labels = [f"prompt {index}" for index, *_ in jobs]
    summary = assert_golden(zip(labels, traces, answers, strict=True))
    assert {source for answer in answers for source in answer.sources} == {0, 1, 2}, summary


# -- processes that are killed -------------------------------------------------------------------


@dataclass
class Stream:
    """One stream, as it comes in."""

    tokens: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    reason: str = ""
    error: BaseException | None = None


def listen(home: Server, bodies: Sequence[Any], before: int, disturb: Callable[[], None]) -> Any:
    """All streams at once; ``disturb`` once they have brought so many tokens together."""
    streams = [Stream() for _ in bodies]

    def follow(body: Any, into: Stream) -> None:
        try:
            for event in home.stream(PATH, body, timeout_s=60.0):
                for choice in event["choices"]:
                    into.tokens += choice.get("token_ids") or []
                    into.sources += (choice.get("trserve") or {"source": []})["source"]
                    into.reason = choice["finish_reason"] or into.reason
        except BaseException as error:
            into.error = error

    threads = [
        threading.Thread(target=follow, args=pair, daemon=True)
        for pair in zip(bodies, streams, strict=True)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 30.0
    while sum(len(stream.tokens) for stream in streams) < before:
        assert time.monotonic() < deadline, "the streams do not begin"
        time.sleep(0.001)
    disturb()
    for thread in threads:
        thread.join(90.0)
        assert not thread.is_alive(), "a stream hangs"
    for stream in streams:
        assert stream.error is None, stream.error
    return streams


def kill(server: Server, module: str) -> None:
    """SIGKILL to the process of ``server`` that runs ``module``."""
    (pid,) = [pid for pid in server.children() if module in command(pid)]
    os.kill(pid, signal.SIGKILL)


def check_undisturbed(pair: Pair, home: Server, tokens: int, disturb: Callable[[], None]) -> None:
    """Streams through ``disturb`` equal the loop's."""
    reference = copy.copy(pair.reference)
    reference.eos = frozenset()
    prompts = random_prompts(4, Random("killed"))
    settings = [
        Setting(max_tokens=tokens, temperature=float(n % 2), seed=LARGE_SEED >> 8 * n)
        for n in range(len(prompts))
    ]
    bodies = []
    for prompt, setting in zip(prompts, settings, strict=True):
        body = body_of(prompt, setting, home.models) | {"ignore_eos": True}
        del body["trserve"]["router"]
        bodies.append(body)
    streams = listen(home, bodies, tokens, disturb)
    traces = [reference.run(p, s, Mixture(WEIGHTS)) for p, s in zip(prompts, settings, strict=True)]
    answers = [Answer(stream.tokens, stream.sources, stream.reason) for stream in streams]
    assert_golden(zip("abcd", traces, answers, strict=True))


@pytest.mark.parametrize("victim", [AGENT, PORT, WORKER])
def test_streams_survive_the_death_of(
    pair: Pair, joined: tuple[Server, Server], victim: str
) -> None:
    """The link agent, the edge port, and the worker of the far host."""
    home, far = joined
    server = home if victim == AGENT else far
    check_undisturbed(pair, home, 60, lambda: kill(server, victim))
    wait_until(lambda: home.request("GET", "/readyz").status, lambda status: status == 200, 10.0)
    wait_until(lambda: far.request("GET", "/readyz").status, lambda status: status == 200, 10.0)


@pytest.mark.slow
def test_streams_survive_the_death_of_the_whole_far_host(apart: Pair) -> None:
    with ExitStack() as stack:
        far = stack.enter_context(apart.far(*MIXTURE))
        home = stack.enter_context(apart.home(*MIXTURE, "--on-peer-loss", "wait"))

        def disturb() -> None:
            far.kill_all()
            time.sleep(0.5)
            stack.enter_context(apart.far(*MIXTURE))

        check_undisturbed(apart, home, 100, disturb)


# -- the far host by itself ----------------------------------------------------------------------


def test_the_far_host_serves_its_own_model_alone(joined: tuple[Server, Server]) -> None:
    home, far = joined
    body = {"model": "trserve", "prompt": [1, 2, 3], "max_tokens": 4, "trserve": {"trace": True}}
    (choice,) = far.post(PATH, body)["choices"]
    assert choice["trserve"]["source"] == [1] * 4
    names = [model["id"] for model in far.request("GET", "/v1/models").json()["data"]]
    assert "edge" not in names
    refused = far.request("POST", PATH, body | {"model": "edge"})
    assert refused.status == 404 and "does not exist" in refused.json()["error"]["message"]
    for name in ("only", "entry_model"):
        refused = far.request("POST", PATH, body | {"trserve": {name: "edge"}})
        assert refused.status == 400
        assert "is at another host" in refused.json()["error"]["message"]
    assert far.request("GET", "/health").json()["models"][0]["status"] == "elsewhere"
    assert home.request("GET", "/health").json()["models"][1]["status"] == "up"


# -- who is refused ------------------------------------------------------------------------------


def refusal(server: Server) -> tuple[int | None, str]:
    """The exit code and the log of a server that must not start."""
    with pytest.raises(StartFailedError) as failed, server:
        pass
    return failed.value.code, failed.value.stderr


def test_a_wrong_key_is_refused_and_both_say_so(pair: Pair, joined: tuple[Server, Server]) -> None:
    """A stranger's client key for the right server, and the right key for another server."""
    _, far = joined
    stranger, right = (Path(pair.key(name)).read_text() for name in ("stranger", "home"))
    server = next(line for line in right.splitlines() if line.startswith("server"))
    mixed = [line for line in stranger.splitlines() if not line.startswith("server")]
    other = pair.folder / "mixed.keys"
    other.write_text("\n".join([*mixed, server]) + "\n")
    other.chmod(0o600)
    code, log = refusal(pair.home(*MIXTURE, key="mixed"))
    assert code == 3 and "refuses the key of --edge-keys" in log
    assert "is refused: its key" in far.stderr
    code, log = refusal(pair.home(*MIXTURE, key="stranger"))
    assert code == 3 and "ends the handshake" in log


@pytest.mark.slow
def test_another_router_is_refused_and_both_say_so(
    pair: Pair, joined: tuple[Server, Server]
) -> None:
    _, far = joined
    code, log = refusal(pair.home("--router", "random", "--on-peer-loss", "degrade"))
    assert code == 3 and "its --router is random, this side's is me" in log
    assert "its --router is random" in far.stderr


@pytest.mark.slow
def test_another_vocabulary_is_refused(pair: Pair, joined: tuple[Server, Server]) -> None:
    folder = pair.folder / "shuffled"
    folder.mkdir()
    for file in pair.slm.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "tokenizer.json").unlink()
    byte_tokenizer(Random(1)).save(str(folder / "tokenizer.json"))
    code, log = refusal(pair.home(*MIXTURE, slm=folder))
    assert code == 3 and "its vocabulary" in log


@pytest.mark.slow
def test_a_home_without_its_far_host(apart: Pair) -> None:
    code, log = refusal(apart.home(*MIXTURE))
    assert code == 3 and "nobody answers" in log
    with apart.home("--router", "entropy", "--on-peer-loss", "degrade") as home:
        # The agent says so after its first try to dial, which the ready line does not wait for.
        said = wait_until(lambda: home.stderr, lambda text: "cannot be reached" in text, 10.0)
        assert "cannot be reached" in said
        body = {"model": "trserve", "prompt": [1, 2, 3], "max_tokens": 4}
        assert home.post(PATH, body)["usage"]["trserve"]["degraded"] is True
        ready = home.request("GET", "/readyz")
        assert ready.status == 200 and ready.json()["status"] == "degraded"


@pytest.mark.slow
def test_a_home_that_fails_says_that_it_is_not_ready(apart: Pair) -> None:
    with ExitStack() as stack:
        far = stack.enter_context(apart.far("--router", "entropy"))
        home = stack.enter_context(apart.home("--router", "entropy"))
        far.kill_all()
        health = wait_until(
            lambda: home.request("GET", "/readyz"), lambda got: got.status == 503, 10.0
        )
        assert "cannot be reached" in health.json()["detail"]
        body = {"model": home.models[1], "prompt": [1, 2, 3], "max_tokens": 4}
        error = home.request("POST", PATH, body)
        assert error.status == 503 and error.json()["error"]["code"] == "model_unreachable"
        alone = {"model": home.models[0], "prompt": [1, 2, 3], "max_tokens": 4}
        assert home.post(PATH, alone)["usage"]["completion_tokens"] == 4
        stack.enter_context(apart.far("--router", "entropy"))
        health = wait_until(
            lambda: home.request("GET", "/readyz"), lambda got: got.status == 200, 20.0
        )
        assert health.status == 200
        assert home.post(PATH, body)["usage"]["completion_tokens"] == 4
