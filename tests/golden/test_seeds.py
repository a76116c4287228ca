"""Seeded requests get their tokens alone, sixty-four at once, and whatever the cache and KV do.

Each server is asked for the same requests, one at a time and all together, and each answer must
be the reference's: so they equal each other. The requests sample, most with filters and penalties,
some routed and some by one model; one server has no prefix cache, and one so little KV that the
sixty-four keep taking it from each other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from random import Random

import pytest

from tests.golden.compare import Answer, assert_golden
from tests.golden.completions import PATH, body_of
from tests.golden.pairs import Pair, loads, settings_of
from tests.golden.random_pair import OUTPUT, RandomPair, build_random_pair, random_prompts
from tests.golden.reference import SLM, Reference, Setting
from tests.golden.test_golden import choice_seed
from tests.serverproc import Server

TOGETHER = 64
SERVERS: dict[str, Sequence[str]] = {
    "cache": (),
    "no-cache": ("--no-enable-prefix-caching",),
    "pressure": ("--memory", "700k", "--block-size", "8"),
}


class Seeded(Pair):
    """Every case has a seed of its own."""

    def setting(self, case: tuple[int, str]) -> Setting:
        index, name = case
        seed = Random(f"seed {index} {name}").getrandbits(63)
        return dataclasses.replace(self.settings[name], seed=seed)


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> RandomPair:
    return build_random_pair(tmp_path_factory.mktemp("seeds"), seed=2)


@pytest.fixture(scope="module")
def reference(built) -> Reference:
    """One for all servers: it decodes each request once."""
    return Reference(built.slm, built.llm)


@pytest.fixture(scope="module", params=SERVERS)
def pair(request, built, reference) -> Iterator[Pair]:
    args = ["--models", f"{built.slm},{built.llm}", "--dtype", "float32", "--device", "cpu"]
    prompts = random_prompts(TOGETHER // 4, Random("seeds"))
    known = settings_of(built.taus, OUTPUT)
    settings = {name: known[name] for name in ("sampled", "warm", "shaped")}
    settings["alone"] = dataclasses.replace(known["shaped"], only=SLM)
    with Server([*args, "--router", "r-stitch", *SERVERS[request.param]]) as server:
        yield Seeded(request.param, server, reference, prompts, settings)


def cases(pair: Pair) -> list[tuple[int, str]]:
    found = [(index, name) for index in range(len(pair.prompts)) for name in pair.settings]
    Random("order").shuffle(found)
    assert len(found) == TOGETHER
    return found


def test_alone_and_sixty_four_at_once(pair, full):
    every = cases(pair)
    pair.check(every if full else every[::8], 1, streamed=[False])
    for _ in range(3 if full else 1):
        pair.check(every, TOGETHER, streamed=[True, False])
    for model in loads(pair.server):
        assert bool(model["kv_drops"]) is (pair.name == "pressure")
        assert bool(model["cache_hit_tokens"]) is (pair.name != "no-cache")
        assert model["free_blocks"] + model["cached_blocks"] == model["total_blocks"]


def test_sixty_four_choices_of_one_request(pair):
    """They begin together, so a step holds all of them; each has the seed that is documented."""
    setting = pair.setting((1, "shaped"))
    prompt = list(pair.prompts[1])
    body = body_of(prompt, setting, pair.server.models) | {"n": TOGETHER}
    choices = pair.server.post(PATH, body, timeout_s=120.0)["choices"]
    assert [choice["index"] for choice in choices] == list(range(TOGETHER))
    found = []
    for choice in choices:
        own = dataclasses.replace(setting, seed=choice_seed(setting.seed, choice["index"]))
        trace = pair.reference.run(prompt, own)
        answer = Answer(choice["token_ids"], choice["trserve"]["source"], choice["finish_reason"])
        found.append((f"choice {choice['index']}", trace, answer))
    assert_golden(found)
