"""A whole server on the GPU's runner, emulated on the CPU, equals the reference of its models."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest

from tests.golden.pairs import SETTINGS, Pair, settings_of
from tests.golden.reference import SLM, Reference
from tests.golden.word_problems import chat_prompts
from tests.serverproc import Server
from trserve.demo import model_path

TAUS = (0.02, 0.05, 0.3)
SHORT = 20


@pytest.fixture(scope="module")
def embedded(full) -> Iterator[Pair]:
    slm, llm = model_path("tiny"), model_path("small")
    reference = Reference(slm, llm)
    prompts = chat_prompts(60 if full else 3, Random("graphs"), reference.models[SLM].tokenizer)
    settings = settings_of(TAUS, 56 if full else SHORT)
    args = ["--models", f"{slm},{llm}", "--dtype", "float32", "--router", "r-stitch"]
    emulated = {"TRSERVE_RUNNER": "graphs-on-cpu"}
    with Server([*args, "--device", "cpu", "--max-num-seqs", "12"], env=emulated) as server:
        assert server.stderr.count("emulates a GPU's on the CPU") == 2
        yield Pair("embedded, graphs on the CPU", server, reference, prompts, settings)
        assert server.stop() == 0


def test_buckets_decide_what_the_reference_decides(embedded):
    """All settings at once: those with penalties are decided on the host, others in the step."""
    cases = [(index, name) for index in range(len(embedded.prompts)) for name in SETTINGS]
    Random("order").shuffle(cases)
    summary = embedded.check(cases, 8, streamed=[True, False])
    assert summary.tokens > 300
