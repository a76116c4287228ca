"""Requests that arrive at a set rate, some of whose clients leave in the middle.

Arrivals do not wait for answers, as those of many independent clients do not; only the number of
requests that are open at once is bounded. Knows no processes and no memory.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from bench.soak_load import ANSWER_TIMEOUT_S, Client, encode

MAX_OPEN: Final = 128
"""Beyond that an arrival waits, and is counted as late: the server does not keep up."""
LEAVE_SHARE: Final = 0.15
_LONGEST: Final = 120
_PROBLEMS: Final = (
    "What is {a} + {b}?",
    "What is {a} - {b}?",
    "Eva has {a} pencils. Then she gives away {b}. How many pencils does Eva have now?",
    "Hello!",
)


class Visit(NamedTuple):
    """One request: its bytes, whether it streams, and after how many events its client leaves.

    ``leaves_after`` is None for one who stays; of a whole answer, which has no events, it is
    thousandths of a second.
    """

    data: bytes
    streams: bool
    leaves_after: int | None


def make_visit(number: int, seed: int) -> Visit:
    """The ``number``-th request of a run: chats and texts of many lengths, routed at many rates."""
    dice = random.Random(f"paced {seed} {number}")
    streams = dice.random() < 0.7
    body: dict[str, Any] = {
        "model": "trserve",
        "max_tokens": dice.randint(1, _LONGEST),
        "ignore_eos": dice.random() < 0.5,
        "seed": number,
        "stream": streams,
        "temperature": dice.choice((0, 0, 0.7, 1)),
    }
    if dice.random() < 0.2:
        body["trserve"] = {"router": {"tau": dice.choice((0.0, 0.05, 0.5))}}
    text = dice.choice(_PROBLEMS).format(a=dice.randint(20, 99), b=dice.randint(1, 20))
    if dice.random() < 0.7:
        path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": text}]
    else:
        path, body["prompt"] = "/v1/completions", f"{text} " * dice.randint(1, 8)
    leaves = dice.randint(0, 20) if dice.random() < LEAVE_SHARE else None
    return Visit(encode(path, body), streams, leaves)


class PacedLoad:
    """Sends what ``make`` makes of 0, 1, ... until it is told to stop.

    Args:
        per_s: arrivals a second, at random moments; None for as soon as one of ``width`` is free.
        width: requests that are open at once, at most.

    Attributes:
        statuses: answers by HTTP status, as far as clients waited for it.
        left: clients that left.
        late: arrivals that had to wait for one of ``width``.
        seconds: of the answers that were read to the end, how long each took.
    """

    def __init__(
        self,
        address: tuple[str, int],
        make: Callable[[int], Visit],
        *,
        per_s: float | None,
        width: int = MAX_OPEN,
        first: int = 0,
    ) -> None:
        self._address = address
        self._make = make
        self._per_s = per_s
        self._room = asyncio.Semaphore(width)
        self._idle: list[Client] = []
        self.number = first
        self.statuses: Counter[int] = Counter()
        self.left = self.late = 0
        self.seconds: list[float] = []

    async def run(self, seconds: float) -> None:
        """Send for so long, and return when all is answered and all connections are closed.

        Raises:
            ExceptionGroup: of RuntimeError or TimeoutError: an answer was incomplete, or none came.
        """
        dice = random.Random(self.number)
        began = due = time.monotonic()
        async with asyncio.TaskGroup() as group:
            while due < began + seconds:
                if (wait := due - time.monotonic()) > 0:
                    await asyncio.sleep(wait)
                self.late += self._per_s is not None and self._room.locked()
                await self._room.acquire()
                group.create_task(self._one(self._make(self.number)))
                self.number += 1
                if self._per_s is None:
                    due = time.monotonic()
                else:
                    due += dice.expovariate(self._per_s)
        for client in self._idle:
            await client.close()
        self._idle.clear()

    async def _one(self, visit: Visit) -> None:
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                client = self._idle.pop() if self._idle else await Client.connect(*self._address)
                client.send(visit.data)
                if visit.leaves_after is None:
                    await self._stay(client, visit)
                else:
                    await self._leave(client, visit)
        finally:
            self._room.release()

    async def _stay(self, client: Client, visit: Visit) -> None:
        began = time.monotonic()
        head, body = await client.answer()
        status = int(head.split(b" ", 2)[1])
        self.statuses[status] += 1
        if status == 200:
            self.seconds.append(time.monotonic() - began)
            ended = not visit.streams or b"data: [DONE]" in body
            if b'"finish_reason":"' not in body or not ended or b'"error"' in body:
                raise RuntimeError(f"a wrong answer to {visit.data!r}: {(head + body)!r}")
        self._idle.append(client)

    async def _leave(self, client: Client, visit: Visit) -> None:
        """Go away after some events, or at once; the answer may have ended before."""
        assert visit.leaves_after is not None
        try:
            if visit.streams:
                self.statuses[await client.events(visit.leaves_after)] += 1
            else:
                await asyncio.sleep(visit.leaves_after / 1000)
        except asyncio.IncompleteReadError as error:
            raise RuntimeError(f"a connection ended by itself: {error.partial!r}") from None
        self.left += 1
        await client.close()
