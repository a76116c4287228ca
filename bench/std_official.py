"""The original projects' ways to run their algorithms, as variations of standard serving.

What is faithful, and what is not:

- ``official-co-llm``: two servers, the whole token list sent over HTTP for every token, no prefix
  cache in either, so each call prefills the whole row; logprobs with every answer. Not faithful:
  the original asks for the logprobs of the whole vocabulary (a number for each of 32,000 ids as
  JSON); a server here gives 20 at most, which is far cheaper; and its forwarder between client and
  servers is left out. Both favour this baseline.
- ``official-citer``: a static batch: all rows take a step together, the routed ones then wait for
  the large model, and the next step begins when the last of them is back; a batch ends with its
  longest answer. The large model has no prefix cache, so that a routed token prefills its whole
  row; the small one keeps its KV (here: its prefix cache). Not faithful: the original runs both
  models in one process without a server (no HTTP; plain eager kernels, no paging), and its rows go
  to the large model one after the other in a Python loop, while here they are sent together.
- ``official-r2r``: no servers, but two workers that poll queues, and one pickled message a token
  between them; on emulated devices (``official_r2r_system`` says what is not faithful).

Knows no tables.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from bench.closed_loop import Record, Until, Window, measure
from bench.endpoint import Address
from bench.http_client import Connection
from bench.std_dispatch import DispatchUser, ModelClient, Row, Tally
from bench.std_policy import LLM, SLM, TOPS, Decision, Drawn, Policy
from bench.workloads import Question, Workload

if TYPE_CHECKING:
    from bench.systems import Running, Setup

CO_LLM: Final = "official-co-llm"
CITER: Final = "official-citer"
R2R: Final = "official-r2r"
_NO_CACHE: Final = ("--no-enable-prefix-caching",)
OFFICIAL: Final[dict[str, Sequence[Sequence[str]]]] = {
    CO_LLM: (_NO_CACHE, _NO_CACHE),
    CITER: ((), _NO_CACHE),
}
"""By system: the flags of each model's server."""


def ways_of(algorithm: str) -> Sequence[str]:
    """The original projects' systems that are a baseline of ``algorithm``."""
    return (R2R,) if algorithm == "r2r" else tuple(OFFICIAL)


def official(system: str, servers: tuple[Address, ...], setup: Setup) -> Running:
    """The system on servers that are up."""

    def make_policy(seed: int) -> Policy:
        return setup.algorithm.policy(seed, setup.vocabulary)

    return (CoLlm if system == CO_LLM else Citer)(servers, make_policy)


@dataclass(frozen=True)
class WithLogprobs:
    """A policy, and logprobs with every token whether it needs them or not."""

    inner: Policy
    tops: int = TOPS

    def decide(self, model: int, drawn: Drawn) -> Decision:
        return self.inner.decide(model, drawn)


@dataclass(frozen=True)
class CoLlm:
    """Independent requests, every call with logprobs."""

    servers: tuple[Address, ...]
    make_policy: Callable[[int], Policy]

    async def measure(self, concurrency: int, workload: Workload, until: Until) -> Window:
        tally = Tally(len(self.servers))

        def user(number: int) -> DispatchUser:
            place = number, concurrency
            return DispatchUser(self.servers, self._policy, workload, place, tally)

        return await measure(user, tally, concurrency, until)

    def _policy(self, seed: int) -> Policy:
        return WithLogprobs(self.make_policy(seed))


@dataclass(frozen=True)
class Citer:
    """Static batches of all users' requests."""

    servers: tuple[Address, ...]
    make_policy: Callable[[int], Policy]

    async def measure(self, concurrency: int, workload: Workload, until: Until) -> Window:
        tally = Tally(len(self.servers))
        batch = StaticBatch(self.servers, self.make_policy, workload, concurrency, tally)
        window = await measure(lambda _: batch, tally, 1, until)
        return replace(window, concurrency=concurrency)


class StaticBatch:
    """All users as one: batches of ``size`` requests in lockstep, one after the other."""

    def __init__(
        self,
        servers: Sequence[Address],
        make_policy: Callable[[int], Policy],
        workload: Workload,
        size: int,
        tally: Tally,
    ) -> None:
        self._servers = servers
        self._make_policy = make_policy
        self._workload = workload
        self._size = size
        self._tally = tally

    async def run(self, record: Record) -> None:
        """Write batches without end; the connections are closed when this is cancelled."""
        opened = [[await server.connect() for server in self._servers] for _ in range(self._size)]
        try:
            for turn in range(1_000_000):
                await self._batch(opened, record, turn)
        finally:
            for connection in (each for pair in opened for each in pair):
                connection.close()

    async def _batch(self, opened: list[list[Connection]], record: Record, turn: int) -> None:
        began, places = time.perf_counter(), range(self._size)
        # All begin and, where answers have one length, end together: nothing is staggered.
        questions = [self._workload.question(turn + 1, place, self._size) for place in places]
        lanes = [
            Lane(each, self._make_policy(each.number), pair, ignore_eos=self._workload.ignore_eos)
            for each, pair in zip(questions, opened, strict=True)
        ]
        writing, first = lanes, True
        while writing:
            await lockstep(writing, self._tally)
            if first:
                record.first_token(began, time.perf_counter())
                first = False
            writing = [lane for lane in writing if not lane.ended]
        record.ended(began, time.perf_counter())


class Lane:
    """One row of a static batch."""

    def __init__(
        self, question: Question, policy: Policy, pair: Sequence[Connection], *, ignore_eos: bool
    ) -> None:
        self._most = question.max_tokens
        self._policy = policy
        self._clients = [
            ModelClient(each, question.number, policy.tops, ignore_eos=ignore_eos) for each in pair
        ]
        self.row = Row(question.prompt)
        self.ended = False

    async def token(self, model: int, tally: Tally) -> int:
        """Draw one token at ``model``; returns the model whose turn it is then."""
        drawn = await self._clients[model].token(self.row)
        tally.calls += 1
        decision = self._policy.decide(model, drawn)
        if decision.keep:
            self.row.append(drawn.token)
            tally.tokens[model] += 1
            self.ended = drawn.ends or len(self.row.output) >= self._most
        tally.handoffs += decision.model != model
        return decision.model


async def lockstep(lanes: Sequence[Lane], tally: Tally) -> None:
    """One step of all ``lanes``: the small model, then the large one for those that are routed."""
    turns = await asyncio.gather(*(lane.token(SLM, tally) for lane in lanes))
    routed = [
        lane for lane, model in zip(lanes, turns, strict=True) if model == LLM and not lane.ended
    ]
    while routed:
        turns = await asyncio.gather(*(lane.token(LLM, tally) for lane in routed))
        routed = [
            lane
            for lane, model in zip(routed, turns, strict=True)
            if model == LLM and not lane.ended
        ]
