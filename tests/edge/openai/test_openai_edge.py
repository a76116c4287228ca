"""``trserve edge`` with the large model at a server that takes ids: equal to the plain loop.

Greedy, as a server that knows nothing of positions draws its own numbers.
"""

import json
import sys
from random import Random

import pytest
from safetensors.torch import load_file

from tests.edge.onnx.exporting import require_runtime
from tests.golden.compare import assert_golden
from tests.golden.completions import PATH, body_of
from tests.golden.reference import Setting
from tests.golden.routed import RoutedReference
from tests.golden.rules import OneWay
from tests.golden.test_routers import answer_of
from tests.golden.word_problems import chat_prompts
from tests.router_lib import networks
from tests.serverproc import Server, concurrently
from trserve import demo

require_runtime()

TOKENS = 48


class Edge(Server):
    COMMAND = (sys.executable, "-m", "trserve", "edge", "--port", "0")


@pytest.fixture(scope="module")
def edge(trserve, tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    args = ["--model", "tiny", "--cloud", f"openai:{trserve.url}/v1", "--threads", "1,1"]
    with Edge(args, env={"XDG_CACHE_HOME": str(cache)}) as server:
        yield server


def test_it_says_what_it_is_and_what_it_does_first(edge):
    assert "models=tiny,small router=confidence device=onnx" in edge.stdout[0]
    assert "tiny is exported for ONNX Runtime, once" in edge.stderr
    page = edge.request("GET", "/")
    assert page.status == 200 and b"<html" in page.body


@pytest.mark.parametrize("visit", [1, 3])
def test_greedy_answers_equal_those_of_one_host(edge, visit, full):
    folder = demo.ROUTERS_DIR / "confidence"
    tensors = load_file(folder / "confidence.safetensors")
    threshold = json.loads((folder / "report.json").read_text())["threshold"]
    reference = RoutedReference(demo.model_path("tiny"), demo.model_path("small"))
    prompts = chat_prompts(30 if full else 3, Random("edge"), reference.models[0].tokenizer)
    setting = Setting(max_tokens=TOKENS)

    def signal(view):
        return networks.confidence_probability(tensors, view.hidden)

    jobs = []
    for index, prompt in enumerate(prompts):
        rule = OneWay(signal, threshold, above=False, visit=visit)
        body = body_of(prompt, setting, edge.models)
        body["trserve"]["router"] = {"visit_tokens": visit}
        jobs.append((f"prompt {index}", reference.run(prompt, setting, rule), body))
    replies = concurrently(lambda at: edge.post(PATH, jobs[at][2]), range(len(jobs)), 4)
    answers = [answer_of(reply) for reply in replies]
    assert_golden(
        (label, trace, answer) for (label, trace, _), answer in zip(jobs, answers, strict=True)
    )
    for (_, trace, _), reply in zip(jobs, replies, strict=True):
        assert reply["usage"]["trserve"]["degraded"] is False
        assert reply["usage"]["trserve"]["handoffs"] == trace.handoffs
    assert {source for answer in answers for source in answer.sources} == {0, 1}


def test_a_request_may_be_the_large_model_s_alone(edge, trserve):
    """Streamed in pieces of a call each, and with log probabilities."""
    body = {"prompt": list(range(20, 50)), "max_tokens": 24, "temperature": 0, "logprobs": 0}
    own = {"return_token_ids": True}
    (alone,) = trserve.post(PATH, body | own)["choices"]
    (here,) = edge.post(PATH, body | own | {"trserve": {"only": "small"}})["choices"]
    assert here["token_ids"] == alone["token_ids"]
    assert here["logprobs"]["token_logprobs"] == pytest.approx(
        alone["logprobs"]["token_logprobs"], abs=1e-3
    )
