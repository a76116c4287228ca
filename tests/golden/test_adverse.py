"""The same equality under adverse conditions: little room in a step, shared prefixes, deaths.

A step of the server may take four requests and 24 tokens, so prompts are cut into chunks and
batches change all the time; and its workers are killed while it answers.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from random import Random

import pytest

from tests.golden.pairs import SETTINGS, Pair, settings_of
from tests.golden.random_pair import OUTPUT, build_random_pair, random_prompts
from tests.golden.reference import Reference
from tests.procfs import maps
from tests.serverproc import Server, wait_until

RECOVERY_S = 30.0
ARGS = (
    *("--dtype", "float32", "--device", "cpu", "--router", "r-stitch"),
    *("--max-num-batched-tokens", "24", "--max-num-seqs", "4", "--enable-prefix-caching"),
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory, full) -> Iterator[Pair]:
    built = build_random_pair(tmp_path_factory.mktemp("adverse"), seed=1)
    prompts = random_prompts(60 if full else 9, Random("adverse"))
    # A conversation that goes on: a later prompt begins with the whole of an earlier one.
    prompts += [prompt + list(range(20)) for prompt in prompts[:6]]
    with Server([*ARGS, "--models", f"{built.slm},{built.llm}"]) as server:
        reference = Reference(built.slm, built.llm)
        yield Pair("adverse", server, reference, prompts, settings_of(built.taus, OUTPUT))


def everything(pair: Pair) -> list[tuple[int, str]]:
    cases = [(index, name) for index in range(len(pair.prompts)) for name in SETTINGS]
    Random("order").shuffle(cases)
    return cases


def workers(pair: Pair) -> list[int]:
    """The processes that have torch loaded: one a model."""
    return [pid for pid in pair.server.children() if "libtorch" in maps(pid)]


def test_small_steps_and_shared_prefixes(pair):
    pair.check(everything(pair), 32, streamed=[True, False])


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1])
def test_a_worker_is_killed_while_it_answers(pair, which):
    """Every stream goes on from its row, with the tokens it would have had."""
    cases = everything(pair)
    for case in cases:
        pair.expected(case)  # beforehand, so that the kill falls among the requests
    before = workers(pair)
    assert len(before) == 2
    victim = sorted(before)[which]
    timer = threading.Timer(0.5, os.kill, (victim, signal.SIGKILL))
    timer.start()
    pair.check(cases, 32, streamed=[True])
    timer.join()
    after = wait_until(lambda: workers(pair), lambda found: len(found) == 2, RECOVERY_S)
    assert victim not in after
    assert len(after) == 2
    health = wait_until(
        lambda: pair.server.request("GET", "/health").status, lambda s: s == 200, RECOVERY_S
    )
    assert health == 200
