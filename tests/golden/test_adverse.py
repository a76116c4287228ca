"""The same equality under adverse conditions: little room in a step, little memory for KV.

A step of the server may take four requests and 24 tokens, so prompts are cut into chunks and
batches change all the time. In the second server the KV cache holds about one and a half of the
longest rows, so that requests keep taking each other's blocks and compute them again.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest

from tests.golden.pairs import SETTINGS, Pair, settings_of
from tests.golden.random_pair import OUTPUT, build_random_pair, random_prompts
from tests.golden.reference import Reference
from tests.serverproc import Server

ARGS = (
    *("--dtype", "float32", "--device", "cpu", "--router", "r-stitch"),
    *("--max-num-batched-tokens", "24", "--max-num-seqs", "4"),
)
SMALL_KV = ("--memory", "560k", "--block-size", "8")


@pytest.fixture(scope="module", params=[(), SMALL_KV], ids=["small-steps", "small-kv"])
def pair(request, tmp_path_factory, full) -> Iterator[Pair]:
    built = build_random_pair(tmp_path_factory.mktemp("adverse"), seed=1)
    prompts = random_prompts(60 if full else 9, Random("adverse"))
    # A conversation that goes on: a later prompt begins with the whole of an earlier one.
    prompts += [prompt + list(range(20)) for prompt in prompts[:6]]
    with Server([*ARGS, *request.param, "--models", f"{built.slm},{built.llm}"]) as server:
        reference = Reference(built.slm, built.llm)
        yield Pair("adverse", server, reference, prompts, settings_of(built.taus, OUTPUT))


def everything(pair: Pair) -> list[tuple[int, str]]:
    cases = [(index, name) for index in range(len(pair.prompts)) for name in SETTINGS]
    Random("order").shuffle(cases)
    return cases


def test_every_request_gets_its_tokens(pair, request):
    pair.check(everything(pair), 32, streamed=[True, False])
    models = pair.server.request("GET", "/health").json()["models"]
    if "small-kv" in request.node.name:
        assert all(model["kv_drops"] for model in models), "there was no pressure"
    for model in models:
        assert model["free_blocks"] + model["cached_blocks"] == model["total_blocks"]
        assert model["cache_hit_tokens"], "prompts that begin alike found nothing in the cache"
        assert not model["kv_repairs"]
