"""The baseline writes what trserve writes: its dispatcher on real servers, greedily.

One server a model of the embedded pair, and trserve's server of both; answers must be the same
token for token wherever the router decides the same.
"""

import asyncio
from contextlib import ExitStack

import pytest

from bench.endpoint import Address, launched
from bench.std_dispatch import ModelClient, Row, Tally, write
from bench.std_policy import (
    TOPS,
    Alone,
    Chance,
    EntropyStitch,
    TopProbability,
    normalized_entropy,
)
from bench.throughput_options import tokenizer_size
from bench.workloads import problem_prompts
from tests.serverproc import Server

MODELS = ("tiny", "small")
DEVICE = ("--device", "cpu", "--threads")
MOST = 60
TAU = 0.05


@pytest.fixture(scope="module")
def singles():
    with ExitStack() as stack:
        yield tuple(
            stack.enter_context(launched(["--models", model, "--router", "none", *DEVICE, "1"]))
            for model in MODELS
        )


@pytest.fixture(scope="module")
def pair():
    flags = ["--models", ",".join(MODELS), "--router-config", f"tau={TAU}", *DEVICE, "1,1"]
    with Server(flags) as server:
        yield server


def dispatched(servers: tuple[Address, ...], prompt, policy):
    """The dispatcher's answer, and its tokens by model."""

    async def run():
        connections = [await server.connect() for server in servers]
        clients = [ModelClient(each, 0, policy.tops, ignore_eos=False) for each in connections]
        tally = Tally(2)
        try:
            return await write(Row(prompt), clients, policy, MOST, tally), tally
        finally:
            for connection in connections:
                connection.close()

    return asyncio.run(run())


def served(server: Server, prompt, **extension):
    """The same answer by trserve: its choice."""
    body = {"prompt": list(prompt), "max_tokens": MOST, "temperature": 0, "return_token_ids": True}
    (choice,) = server.post("/v1/completions", body | {"trserve": extension})["choices"]
    return choice


PROMPTS = problem_prompts()[:4]


@pytest.mark.parametrize(
    ("policy", "model"),
    [(Alone(), 0), (Chance(0.0, seed=1), 0), (Chance(1.0, seed=1), 1)],
    ids=["alone", "p=0", "p=1"],
)
def test_one_model_writes_as_that_model_alone(singles, pair, policy, model):
    for prompt in PROMPTS:
        output, tally = dispatched(singles, prompt, policy)
        assert output == served(pair, prompt, only=MODELS[model])["token_ids"]
        assert tally.tokens[model] == len(output)


def test_r_stitch_by_twenty_logprobs_decides_as_trserve_does(singles, pair):
    vocabulary = tokenizer_size(MODELS)
    differ = steps = own = trserves = written = 0
    for prompt in problem_prompts()[:8]:
        choice = served(pair, prompt, trace=True)
        tokens, sources = choice["token_ids"], choice["trserve"]["source"]
        drawn = asyncio.run(forced(singles, prompt, tokens, sources))
        assert [each.token for each in drawn] == tokens
        for each, exact in zip(drawn, choice["trserve"]["score"], strict=True):
            entropy = normalized_entropy(each.logprobs, vocabulary)
            assert entropy <= exact + 1e-4
            differ += (entropy > TAU) != (exact > TAU)
            steps += 1
        _, tally = dispatched(singles, prompt, EntropyStitch(TAU, vocabulary))
        own += tally.tokens[1]
        trserves += sum(sources)
        written += len(tokens)
    assert differ <= 0.01 * steps
    assert own > 0 and abs(own - trserves) / written < 0.02


async def forced(servers, prompt, tokens, sources):
    """What the writer of each of ``tokens`` draws where it wrote it."""
    connections = [await server.connect() for server in servers]
    clients = [ModelClient(each, 0, TOPS, ignore_eos=False) for each in connections]
    row, drawn = Row(prompt), []
    for token, source in zip(tokens, sources, strict=True):
        drawn.append(await clients[source].token(row))
        row.append(token)
    for connection in connections:
        connection.close()
    return drawn


def test_top_probability_is_trserves_exactly(singles):
    config = ["--router", "top-prob", "--router-config", "threshold=0.7"]
    with Server(["--models", ",".join(MODELS), *config, *DEVICE, "1,1"]) as server:
        routed = 0
        for prompt in problem_prompts()[:8]:
            choice = served(server, prompt, trace=True)
            output, tally = dispatched(singles, prompt, TopProbability(0.7))
            assert output == choice["token_ids"]
            assert tally.tokens[1] == sum(choice["trserve"]["source"])
            routed += tally.tokens[1]
        assert routed > 0
