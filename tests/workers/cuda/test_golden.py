"""A whole server on the GPU's runner and links, emulated on the CPU, equals the reference.

Suffixes that were handed over are read from inboxes of an emulated device, where they were pushed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from random import Random

import pytest

from tests.faults.streams import (
    Streams,
    check_equal,
    check_nothing_held,
    kill_workers,
    undisturbed,
)
from tests.faults.streams import (
    request as long_request,
)
from tests.golden.pairs import SETTINGS, Pair, settings_of
from tests.golden.reference import SLM, Reference
from tests.golden.word_problems import chat_prompts
from tests.serverproc import Server
from trserve.demo import model_path

TAUS = (0.02, 0.05, 0.3)
SHORT = 20


LINKS = ("cuda_ipc", *(pytest.param(link, marks=pytest.mark.slow) for link in ("host_mapped", "")))
"""What is emulated; nothing: tokens go through the slab alone."""


@pytest.fixture(scope="module", params=LINKS)
def embedded(request, full) -> Iterator[Pair]:
    link = request.param
    slm, llm = model_path("tiny"), model_path("small")
    reference = Reference(slm, llm)
    many = full and link == LINKS[0]
    prompts = chat_prompts(60 if many else 3, Random("graphs"), reference.models[SLM].tokenizer)
    settings = settings_of(TAUS, 56 if many else SHORT)
    args = ["--models", f"{slm},{llm}", "--dtype", "float32", "--router", "r-stitch"]
    emulated = {"TRSERVE_RUNNER": "graphs-on-cpu", "TRSERVE_EMULATED_LINK": link}
    with Server([*args, "--device", "cpu", "--max-num-seqs", "12"], env=emulated) as server:
        assert server.stderr.count("emulates a GPU's on the CPU") == 2
        yield Pair("embedded, graphs on the CPU", server, reference, prompts, settings)
        assert server.stop() == 0
        for worker in range(2) if link else ():
            check_views_were_used(server, worker, link)


def check_views_were_used(server: Server, worker: int, link: str) -> None:
    """What the last of ``worker``'s lives said of its link when it ended."""
    line = rf"worker-{worker}: link emulated-{link}: (\d+) of (\d+) suffixes"
    viewed, came = map(int, re.findall(line, server.stderr)[-1])
    assert 0 < viewed <= came < 2 * viewed


def test_buckets_decide_what_the_reference_decides(embedded):
    """All settings at once: those with penalties are decided on the host, others in the step."""
    cases = [(index, name) for index in range(len(embedded.prompts)) for name in SETTINGS]
    Random("order").shuffle(cases)
    summary = embedded.check(cases, 8, streamed=[True, False])
    assert summary.tokens > 300


def test_streams_outlive_a_worker_whose_inbox_goes_with_it(embedded):
    """Its successor offers another, under a new epoch, which is then used (see the fixture)."""
    server, bodies = embedded.server, [long_request(number, max_tokens=40) for number in range(4)]
    expected = undisturbed(server, bodies)
    streams = Streams(server, bodies)
    streams.until_written(20)
    kill_workers(server, [1])
    check_equal(streams.join(), expected)
    check_equal(undisturbed(server, bodies), expected)
    check_nothing_held(server)
