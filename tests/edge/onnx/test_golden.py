"""A server on ONNX Runtime against the plain loops, by the project's rule of equality.

The embedded pair as a user has it, and (full counts) random models, whose heads are padded, and a
router that reads what the last layer's MLP reads.
"""

import dataclasses
from random import Random

import pytest

from tests.edge.onnx.exporting import require_runtime
from tests.golden.compare import assert_golden
from tests.golden.completions import PATH, body_of
from tests.golden.pairs import Pair, settings_of
from tests.golden.random_pair import OUTPUT, build_random_pair, random_prompts
from tests.golden.reference import SLM, Reference
from tests.golden.routed import RoutedReference
from tests.golden.test_golden import EMBEDDED_OUTPUT, EMBEDDED_TAUS
from tests.golden.test_routers import EDGE, answer_of, asked, learned
from tests.golden.word_problems import chat_prompts
from tests.serverproc import Server, concurrently
from trserve.demo import model_path

require_runtime()

USUAL = ("middle", "sampled", "llm-first", "shaped")


def onnx_server(tmp_path, *args):
    env = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    return Server(["--device", "onnx", "--threads", "1,1", *args], env=env)


def test_the_embedded_pair(tmp_path, full):
    reference = Reference(model_path("tiny"), model_path("small"))
    tokenizer = reference.models[SLM].tokenizer
    prompts = chat_prompts(40 if full else 3, Random("onnx"), tokenizer)
    settings = settings_of(EMBEDDED_TAUS, EMBEDDED_OUTPUT)
    with onnx_server(tmp_path) as server:
        assert "device=onnx" in server.stdout[0]
        pair = Pair("embedded", server, reference, prompts, settings)
        names = settings if full else USUAL
        cases = [(index, name) for index in range(len(prompts)) for name in names]
        pair.check(cases, 8, streamed=[True, False])
        check_scored_prompt(pair)


def check_scored_prompt(pair):
    """Log probabilities of a prompt come from the head's own graph: as those of a step."""
    prompt = list(pair.prompts[0])
    body = {"prompt": prompt, "max_tokens": 1, "logprobs": 1, "temperature": 0, "echo": True}
    (choice,) = pair.server.post(PATH, body)["choices"]
    session = pair.reference.models[SLM].session()
    expected = session.logits(prompt[:-1]).log_softmax(-1)
    found = choice["logprobs"]["token_logprobs"]
    assert found[len(prompt) - 1] == pytest.approx(float(expected[prompt[-1]]), abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_random_models(family, tmp_path):
    built = build_random_pair(tmp_path / "models", family)
    reference = Reference(built.slm, built.llm)
    prompts = random_prompts(60, Random("onnx"))
    settings = settings_of(built.taus, OUTPUT)
    models = ["--models", f"{built.slm},{built.llm}", "--router", "r-stitch"]
    with onnx_server(tmp_path, *models) as server:
        pair = Pair(family, server, reference, prompts, settings)
        cases = [(index, name) for index in range(len(prompts)) for name in settings]
        Random("order").shuffle(cases)
        pair.check(cases, 8, streamed=[True, False])


@pytest.mark.slow
def test_a_router_that_reads_the_tap(tmp_path):
    built = build_random_pair(tmp_path / "models", seed=3)
    reference = RoutedReference(built.slm, built.llm)
    file, cases = learned(reference, tmp_path, EDGE, "threshold")
    config = ["--router", "confidence", "--router-config", f"checkpoint={file},tap=pre-mlp"]
    with onnx_server(tmp_path, "--models", f"{built.slm},{built.llm}", *config) as server:
        jobs = []
        for case in cases:
            for index, prompt, setting in asked(20):
                if case.entry is not None:
                    setting = dataclasses.replace(setting, entry=case.entry)
                named = case.entry is not None
                trace = reference.run(prompt, setting, case.rule(), named=named)
                body = body_of(prompt, setting, server.models)
                body["trserve"]["router"] = case.own
                jobs.append((f"{case.own}, prompt {index}", trace, body))
        replies = concurrently(lambda at: server.post(PATH, jobs[at][2]), range(len(jobs)), 8)
        labels_and_traces = ((label, trace) for label, trace, _ in jobs)
        answers = map(answer_of, replies)
        assert_golden(
            (*pair, answer) for pair, answer in zip(labels_and_traces, answers, strict=True)
        )
