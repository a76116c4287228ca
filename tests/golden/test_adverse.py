"""The same equality under adverse conditions: little room in a step, little memory for KV.

A step of the server may take four requests and 24 tokens, so prompts are cut into chunks and
batches change all the time, and each model waits for others before a step. In the second server
the KV cache holds about one and a half of the longest rows, so that requests keep taking each
other's blocks and compute them again; what they gave up may still be in the prefix cache, and in
the third server it never is.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest

from tests.golden.completions import ask
from tests.golden.pairs import SETTINGS, Pair, loads, settings_of
from tests.golden.random_pair import OUTPUT, RandomPair, build_random_pair, random_prompts
from tests.golden.reference import Reference
from tests.serverproc import Server

ARGS = (
    *("--dtype", "float32", "--device", "cpu", "--router", "r-stitch"),
    *("--max-num-batched-tokens", "24", "--max-num-seqs", "4", "--batch-threshold", "2,3"),
)
SMALL_KV = ("--memory", "560k", "--block-size", "8")
NO_CACHE = (*SMALL_KV, "--no-enable-prefix-caching")


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> RandomPair:
    return build_random_pair(tmp_path_factory.mktemp("adverse"), seed=1)


@pytest.fixture(scope="module")
def reference(built) -> Reference:
    """One for all servers: it decodes each request once."""
    return Reference(built.slm, built.llm)


@pytest.fixture(
    scope="module", params=[(), SMALL_KV, NO_CACHE], ids=["small-steps", "small-kv", "no-cache"]
)
def pair(request, built, reference, full) -> Iterator[Pair]:
    prompts = random_prompts(60 if full else 9, Random("adverse"))
    # A conversation that goes on: a later prompt begins with the whole of an earlier one.
    prompts += [prompt + list(range(20)) for prompt in prompts[:6]]
    with Server([*ARGS, *request.param, "--models", f"{built.slm},{built.llm}"]) as server:
        yield Pair("adverse", server, reference, prompts, settings_of(built.taus, OUTPUT))


def everything(pair: Pair) -> list[tuple[int, str]]:
    cases = [(index, name) for index in range(len(pair.prompts)) for name in SETTINGS]
    Random("order").shuffle(cases)
    return cases


def test_every_request_gets_its_tokens(pair, request):
    pair.check(everything(pair), 32, streamed=[True, False])
    models = loads(pair.server)
    if "small-steps" not in request.node.name:
        assert all(model["kv_drops"] for model in models), "there was no pressure"
    for model in models:
        assert model["free_blocks"] + model["cached_blocks"] == model["total_blocks"]
        assert bool(model["cache_hit_tokens"]) is ("no-cache" not in request.node.name)
        assert not model["kv_repairs"]


@pytest.mark.parametrize("name", ["slm-only", "llm-only", "sampled"])
def test_a_prompt_asked_again_starts_from_the_cache(pair, request, name):
    """Equal tokens, although all but the last block of the prompt is not computed again."""
    for index in range(3):
        pair.check([(index, name)] * 2, 1, streamed=[True, False])
        prompt = pair.prompts[index]
        details = ask(pair.server, prompt, pair.setting((index, name)), stream=True).usage
        cached = details["prompt_tokens_details"]["cached_tokens"]
        size = 0 if "no-cache" in request.node.name else 8 if "kv" in request.node.name else 16
        assert cached == (size and (len(prompt) - 1) // size * size)
