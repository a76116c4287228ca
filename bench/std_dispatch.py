"""Standard serving's dispatcher: one server a model, and every token is a call of its own.

Each call is ``POST /v1/completions`` with the whole row as token ids and ``max_tokens`` 1, on a
connection that stays open; the answer is not streamed. Between two calls of a request its policy
says which server is next. Requests are independent tasks of one process, so nothing waits for
anything but its own call. What favours this baseline: the dispatcher is in the process of its
clients (a real one costs a hop more), the row is kept as the bytes that are sent, the answer's
JSON is read by a fast parser, and the servers remember prefixes. Knows no windows and no tables.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import orjson

from bench.closed_loop import Counts, Record
from bench.endpoint import COMPLETIONS, Address
from bench.http_client import Connection, encode
from bench.std_policy import SLM, Drawn, Policy
from bench.workloads import Workload

CALL_TIMEOUT_S: Final = 120.0


class Row:
    """A request's tokens, kept as the JSON that carries them, so that no call builds it again."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self._text = bytearray(",".join(map(str, prompt)).encode())
        self.output: list[int] = []

    def append(self, token: int) -> None:
        self._text += b",%d" % token
        self.output.append(token)

    def body(self, options: bytes) -> bytes:
        """The body of a call; ``options`` are the members beside the prompt."""
        return b"".join((b'{"prompt":[', self._text, b"],", options, b"}"))


class ModelClient:
    """One request's connection to one model's server."""

    def __init__(self, connection: Connection, seed: int, tops: int, *, ignore_eos: bool) -> None:
        self._connection = connection
        options: dict[str, Any] = {
            "max_tokens": 1,
            "temperature": 0,
            "seed": seed,
            "ignore_eos": ignore_eos,
            "return_token_ids": True,
        }
        if tops:
            options["logprobs"] = tops
        self._options = orjson.dumps(options)[1:-1]

    async def token(self, row: Row) -> Drawn:
        """The next token of ``row``, as this model draws it; raises HttpError or TimeoutError."""
        data = encode("POST", COMPLETIONS, row.body(self._options))
        return read_token(await self._connection.exchange(data, CALL_TIMEOUT_S))


def read_token(body: bytes) -> Drawn:
    """The token in the body of an answer of one token."""
    (choice,) = orjson.loads(body)["choices"]
    (token,) = choice["token_ids"]
    logprobs = choice.get("logprobs")
    tops = list(logprobs["top_logprobs"][0].values()) if logprobs else ()
    return Drawn(token, tops, choice["finish_reason"] == "stop")


class Tally:
    """Committed tokens by model and moves between models, of all requests of a dispatcher."""

    def __init__(self, models: int) -> None:
        self.tokens = [0] * models
        self.handoffs = 0
        self.calls = 0

    async def read(self) -> Counts:
        """As a ``Probe``; the dispatcher's own numbers are exact at every moment."""
        extra = {"calls": float(self.calls)}
        return Counts(time.perf_counter(), tuple(self.tokens), self.handoffs, extra)


async def write(
    row: Row,
    models: Sequence[ModelClient],
    policy: Policy,
    most: int,
    tally: Tally,
    first: Callable[[], None] = lambda: None,
) -> list[int]:
    """Write up to ``most`` tokens, or to a kept token that ends the answer; returns the output.

    ``first`` is called at the first kept token.
    """
    model = SLM
    while len(row.output) < most:
        drawn = await models[model].token(row)
        tally.calls += 1
        decision = policy.decide(model, drawn)
        if decision.keep:
            row.append(drawn.token)
            tally.tokens[model] += 1
            if len(row.output) == 1:
                first()
            if drawn.ends:
                break
        tally.handoffs += decision.model != model
        model = decision.model
    return row.output


class DispatchUser:
    """A user whose answers the dispatcher writes; ``make_policy`` gives each request its own."""

    def __init__(
        self,
        servers: Sequence[Address],
        make_policy: Callable[[int], Policy],
        workload: Workload,
        place: tuple[int, int],
        tally: Tally,
    ) -> None:
        self._servers = servers
        self._make_policy = make_policy
        self._workload = workload
        self._number, self._users = place
        self._tally = tally

    async def run(self, record: Record) -> None:
        """Ask without end; its connections are closed when this is cancelled."""
        connections = [await server.connect() for server in self._servers]
        try:
            for turn in range(1_000_000):
                await self._ask(connections, record, turn)
        finally:
            for connection in connections:
                connection.close()

    async def _ask(self, connections: Sequence[Connection], record: Record, turn: int) -> None:
        question = self._workload.question(turn, self._number, self._users)
        policy = self._make_policy(question.number)
        clients = [
            ModelClient(each, question.number, policy.tops, ignore_eos=self._workload.ignore_eos)
            for each in connections
        ]
        began = time.perf_counter()
        await write(
            Row(question.prompt),
            clients,
            policy,
            question.max_tokens,
            self._tally,
            lambda: record.first_token(began, time.perf_counter()),
        )
        record.ended(began, time.perf_counter())
