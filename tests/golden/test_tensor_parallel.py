"""A model in two processes writes what it writes in one, token for token, source for source.

The LLM of the embedded pair has two KV heads, so that each of two ranks has one; the SLM has one
and cannot be divided. Also: a rank that is killed takes its worker with it, and the streams go on.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from random import Random

import pytest

from tests.golden.pairs import SETTINGS, Case, Pair, settings_of
from tests.golden.random_pair import OUTPUT, build_random_pair, random_prompts
from tests.golden.reference import LLM, SLM, Reference
from tests.golden.word_problems import chat_prompts
from tests.procfs import command, descendants
from tests.serverproc import Server, run_command, wait_until
from trserve.demo import model_path

ARGS = ("--dtype", "float32", "--device", "cpu", "--router", "r-stitch")
TAUS = (0.02, 0.05, 0.3)
SHORT = 24


def rank_pids(server: Server, model: int) -> list[int]:
    """The processes of the ranks of ``model`` other than 0."""
    marks = ("trserve.workers.tp.rank_main", f"--index={model} ")
    return [pid for pid in descendants(server.pid) if all(m in command(pid) + " " for m in marks)]


@pytest.fixture(scope="module")
def embedded(full) -> Iterator[Pair]:
    slm, llm = model_path("tiny"), model_path("small")
    reference = Reference(slm, llm)
    prompts = chat_prompts(100 if full else 6, Random("ranks"), reference.models[SLM].tokenizer)
    settings = settings_of(TAUS, 56 if full else SHORT)
    with Server([*ARGS, "--models", f"{slm},{llm}", "--tp", "1,2"]) as server:
        assert len(rank_pids(server, LLM)) == 1 and not rank_pids(server, SLM)
        yield Pair("embedded, tp 2", server, reference, prompts, settings)
        assert server.stop() == 0
        assert not server.wait_gone()
        assert "doorbells were lost" not in server.stderr


def cases_of(pair: Pair) -> list[Case]:
    cases = [(index, name) for index in range(len(pair.prompts)) for name in SETTINGS]
    Random("order").shuffle(cases)
    return cases


def test_two_ranks_write_what_one_process_writes(embedded):
    """All settings at once, eight at a time: those of one model alone are steps of ranks only."""
    summary = embedded.check(cases_of(embedded), 8, streamed=[True, False])
    assert summary.tokens > 300


def test_streams_go_on_when_a_rank_is_killed(embedded):
    """The whole worker is replaced, after both of its processes were reaped."""
    server = embedded.server
    cases = [(index, name) for index in range(4) for name in ("llm-only", "high")] * 3
    before = (rank_pids(server, LLM), rank_zero(server))
    killed = threading.Event()
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            while not killed.is_set():
                embedded.check(cases, 6, streamed=[True])
            embedded.check(cases, 6, streamed=[True])
        except BaseException as error:
            errors.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    busy = wait_until(lambda: running(server), lambda count: count >= 2, 10.0)
    os.kill(before[0][0], signal.SIGKILL)
    unready = wait_until(lambda: status(server), lambda code: code == 503, 10.0)
    killed.set()
    asking.join(60.0)
    assert busy >= 2 and unready == 503
    assert not asking.is_alive(), "streams hang"
    if errors:
        raise errors[0]
    after = (rank_pids(server, LLM), rank_zero(server))
    assert len(after[0]) == 1 and after[0] != before[0], "the rank was replaced"
    assert after[1] != before[1], "and rank 0 with it"
    assert "rank 1 was killed by SIGKILL" in server.stderr


@pytest.mark.slow
def test_streams_go_on_when_rank_0_is_killed(embedded):
    """What waits for a rank that is no more is ended with it."""
    server, (rank,) = embedded.server, rank_pids(embedded.server, LLM)
    os.kill(rank_zero(server), signal.SIGKILL)
    embedded.check([(index, "llm-only") for index in range(4)], 4, streamed=[True])
    assert rank not in descendants(server.pid)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("sums", ["shared", "gloo"])
def test_both_models_of_a_random_pair_in_two_ranks_each(tmp_path, family, sums):
    built = build_random_pair(tmp_path, family)
    pair_args = [*ARGS, "--models", f"{built.slm},{built.llm}", "--tp", "2,2"]
    reference = Reference(built.slm, built.llm)
    prompts, settings = random_prompts(40, Random("ranks")), settings_of(built.taus, OUTPUT)
    with Server(pair_args, env={"TRSERVE_TP_SUMS": sums}) as server:
        pair = Pair(f"{family}, {sums}", server, reference, prompts, settings)
        pair.check(cases_of(pair), 16, streamed=[True, False])


def test_gloo_adds_up_to_the_same_tokens(embedded):
    """The library's collective in place of ours, for a few requests: it takes its time."""
    slm, llm = model_path("tiny"), model_path("small")
    args = [*ARGS, "--models", f"{slm},{llm}", "--tp", "1,2"]
    with Server(args, env={"TRSERVE_TP_SUMS": "gloo"}) as server:
        pair = Pair("gloo", server, embedded.reference, embedded.prompts, embedded.settings)
        pair.check([(index, "llm-only") for index in range(3)], 3, streamed=[True])
        server.kill()
        assert not server.wait_gone(), "ranks end with the launcher"


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_streams_go_on_when_a_rank_hangs(embedded, victim):
    """A rank that is stopped keeps the others waiting: the watchdog sees rank 0 and ends all."""
    slm, llm = model_path("tiny"), model_path("small")
    args = [*ARGS, "--models", f"{slm},{llm}", "--tp", "1,2", "--watchdog-s", "2"]
    with Server(args) as server:
        pair = Pair("hang", server, embedded.reference, embedded.prompts, embedded.settings)
        pid = (rank_zero(server), *rank_pids(server, LLM))[victim]
        os.kill(pid, signal.SIGSTOP)
        pair.check([(index, "llm-only") for index in range(4)], 4, streamed=[True])
        assert "hung for 2 s and was killed" in server.stderr


@pytest.mark.slow
def test_the_runner_of_gpus_in_ranks_with_emulated_graphs(embedded):
    slm, llm = model_path("tiny"), model_path("small")
    args = [*ARGS, "--models", f"{slm},{llm}", "--tp", "1,2"]
    with Server(args, env={"TRSERVE_RUNNER": "graphs-on-cpu"}) as server:
        prompts = embedded.prompts[:8]
        pair = Pair("graphs", server, embedded.reference, prompts, embedded.settings)
        pair.check(cases_of(pair), 8, streamed=[True, False])
        assert "graphs emulated on the CPU" in server.stderr


def test_what_cannot_be_divided_is_refused_before_anything_starts():
    done = run_command(["launch", "--port", "0", "--models", "tiny,small", "--tp", "2,1"])
    assert done.returncode == 3
    assert "--tp 2: tiny has 1 KV heads, which 2 ranks cannot share evenly" in done.stderr
    assert done.stdout == ""


def rank_zero(server: Server) -> int:
    marks = ("trserve.workers.main", f"--index={LLM} ")
    (found,) = [
        pid for pid in descendants(server.pid) if all(m in command(pid) + " " for m in marks)
    ]
    return found


def running(server: Server) -> int:
    """Requests at the model of two ranks."""
    model = server.request("GET", "/health").json()["models"][LLM]
    return model["running"] + model["pending"]


def status(server: Server) -> int:
    return server.request("GET", "/readyz").status
