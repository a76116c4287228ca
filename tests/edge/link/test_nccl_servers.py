"""Two real servers whose ids go by emulated communicators, beside a plain loop; one that cannot."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.edge.link.test_servers import AGENT, MIXTURE, PORT, WEIGHTS, Pair, free_port, kill
from tests.golden.compare import Answer, assert_golden, compare
from tests.golden.completions import PATH, body_of
from tests.golden.random_pair import build_random_pair
from tests.golden.reference import Trace
from tests.golden.routed import RoutedReference
from tests.golden.rules import Mixture
from tests.golden.test_routers import answer_of, asked
from tests.serverproc import Server, concurrently
from trserve.edge import nccl_opening
from trserve.edge.keys_command import make_files
from trserve.edge.nccl_opening import check_nccl
from trserve.errors import ConfigError
from trserve.gpus.plan import GpuPlan
from trserve.places import Place

EMULATED = {"TRSERVE_EMULATED_HOST_LINK": "nccl"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("nccl")
    built = build_random_pair(folder, seed=3)
    make_files(folder / "far.keys", folder / "home.keys", "home")
    reference = RoutedReference(built.slm, built.llm)
    return Pair(folder, reference, built.slm, built.llm, free_port())


def with_env(server: Server) -> Server:
    server._env.update(EMULATED)  # type: ignore[attr-defined]
    return server


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["", AGENT, PORT])
def test_two_servers_write_what_a_plain_loop_does(pair: Pair, victim: str) -> None:
    far = with_env(pair.far(*MIXTURE))
    home = with_env(pair.home(*MIXTURE, "--on-peer-loss", "wait"))
    with far, home:
        jobs = asked(8)
        traces = [pair.reference.run(prompt, s, Mixture(WEIGHTS)) for _, prompt, s in jobs]
        wait_until_up(home)

        def one(at: int) -> Answer:
            if victim and at == 4:
                kill(home if victim == AGENT else far, victim)
            _, prompt, setting = jobs[at]
            body = body_of(prompt, setting, home.models)
            del body["trserve"]["router"]
            return answer_of(home.post(PATH, body, timeout_s=60.0))

        answers = concurrently(one, range(len(jobs)), 4)
        labels = [f"prompt {index}" for index, *_ in jobs]
        assert_golden(zip(labels, traces, answers, strict=True))
        if not victim:
            link = home.request("GET", "/health").json()["models"][1]
            assert link["link_nccl_handoffs"] > 10
            # Those were traced, and what is written of each token goes with an answer, whole.
            check_plain(home, jobs, list(zip(traces, answers, strict=True)))
        assert home.stop() == 0
        assert "nothing here is NCCL, or a GPU" in home.stderr
        assert far.stop() == 0


def check_plain(home: Server, jobs: list[Any], found: list[tuple[Trace, Answer]]) -> None:
    before = home.request("GET", "/health").json()["models"][1]["link_nccl_answers"]
    for (_, prompt, setting), (trace, traced) in zip(jobs, found, strict=True):
        body = body_of(prompt, setting, home.models)
        body["trserve"] = {k: v for k, v in body["trserve"].items() if k not in ("router", "trace")}
        choice = home.post(PATH, body, timeout_s=60.0)["choices"][0]
        if not compare(trace, traced).ties:
            assert choice["token_ids"] == list(traced.tokens)
    link = home.request("GET", "/health").json()["models"][1]
    assert link["link_nccl_answers"] > before + 10


def wait_until_up(home: Server) -> None:
    deadline = time.monotonic() + 20.0
    while "ids of tokens travel by emulated nccl" not in home.stderr:
        assert time.monotonic() < deadline
        time.sleep(0.05)


FAR = Place("32b", "10.0.0.2:9000")


def test_what_cannot_be_had_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = GpuPlan(uuids=[["GPU-1"], []])
    for gpu in (None, GpuPlan(uuids=[[], []])):
        with pytest.raises(ConfigError, match="no model is on a GPU here\nleave --link out"):
            check_nccl("nccl", [Place("tiny"), FAR], gpu)
    why = {"nccl": "CuPy is not installed"}
    monkeypatch.setattr(nccl_opening, "missing_packages", lambda: why)
    with pytest.raises(ConfigError, match=r"--link nccl .* CuPy is not installed"):
        check_nccl("nccl", [Place("tiny"), FAR], here)
    with pytest.raises(ConfigError, match="CuPy is not installed"):
        check_nccl("nccl", [Place("edge", "edge"), Place("32b")], here)
    check_nccl("auto", [Place("tiny"), FAR], None)
    check_nccl("nccl", [Place("tiny"), Place("small")], None)
    check_nccl("nccl", [Place("tiny"), Place("x", "openai:http://a/v1")], None)


def test_another_value_of_the_emulation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(nccl_opening.VARIABLE, "cuda_ipc")
    plan: Any = None
    with pytest.raises(ConfigError, match="is nccl or nothing"):
        nccl_opening.open_nccl(plan)
