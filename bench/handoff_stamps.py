"""Stamps at the seams between a worker's parts, for the benchmark of the whole handoff.

Each part is wrapped or subclassed and does what it did; knows nothing of how it does it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trserve.ipc.rings import Descriptor, Kind, RingConsumer, RingProducer

if TYPE_CHECKING:
    from trserve.router_lib.base import BaseRouter, StepResult

Key = tuple[int, int]
"""Generation of the batch's first request, and the hop."""


@dataclass
class Stamps:
    """What one worker noted of its handoffs, in ``time.monotonic_ns``.

    ``sent[key]``: decided, sent, tail stored. ``taken[key]``: woken, received, scheduled, and
    decided again.
    """

    batch: int
    sent: dict[Key, tuple[int, int, int]] = field(default_factory=dict)
    taken: dict[Key, tuple[int, int, int, int]] = field(default_factory=dict)
    woken: int = 0
    received: int = 0
    scheduled: int = 0
    decided: int = 0
    flushing: int = 0
    drained: Sequence[Descriptor] = ()

    def key_of(self, descriptors: Sequence[Descriptor]) -> Key | None:
        """The key of a batch on its way between workers; None for anything else."""
        if len(descriptors) != self.batch:
            return None
        kind, _, gen, hop = descriptors[0]
        return (gen, hop) if kind == Kind.RUN and hop else None


class StampedProducer(RingProducer):
    """Notes when the tail of a batch was stored."""

    def __init__(self, words: memoryview, stamps: Stamps) -> None:
        super().__init__(words)
        self._stamps = stamps

    def push(self, descriptors: Sequence[Descriptor]) -> bool:
        pushed, now = RingProducer.push(self, descriptors), time.monotonic_ns()
        stamps = self._stamps
        if (key := stamps.key_of(descriptors)) is not None:
            stamps.sent[key] = (stamps.decided, stamps.flushing, now)
        return pushed


class StampedConsumer(RingConsumer):
    """Notes when a woken loop looks at it first, and which batch it brings."""

    def __init__(self, words: memoryview, stamps: Stamps) -> None:
        super().__init__(words)
        self._stamps = stamps

    def overflowed(self) -> bool:
        self._stamps.woken = time.monotonic_ns()  # the first that a woken loop asks
        return RingConsumer.overflowed(self)

    def drain(self) -> list[Descriptor]:
        found = RingConsumer.drain(self)
        if len(found) == self._stamps.batch:
            self._stamps.drained = found
        return found


def stamp_cycle(cycle: Any, stamps: Stamps) -> None:
    """Have a ``StepCycle`` note when everything was taken in."""
    run = cycle.run

    def stamped(now_ns: int) -> None:
        if stamps.drained and not stamps.received:
            stamps.received = time.monotonic_ns()
        run(now_ns)

    cycle.run = stamped


def stamp_runner(runner: Any, stamps: Stamps) -> None:
    """Have a ``TorchRunner`` note when a step is ready to be computed."""
    forward = runner.forward

    def stamped(*inputs: Any) -> Any:
        if stamps.drained and not stamps.scheduled:
            stamps.scheduled = time.monotonic_ns()
        return forward(*inputs)

    runner.forward = stamped


def create_router(index: int, vocab_size: int, stamps: Stamps) -> BaseRouter:
    """The router of worker ``index``."""
    from trserve.router_lib.base import BaseRouter, RouterContext

    class PingPong(BaseRouter):
        """Sends the batch on once all of it is in one step."""

        def route(self, result: StepResult) -> list[int]:
            now, count = time.monotonic_ns(), len(result.requests)
            key = stamps.key_of(stamps.drained)
            if key is not None and count == stamps.batch:
                stamps.taken[key] = (stamps.woken, stamps.received, stamps.scheduled, now)
            if count == stamps.batch:
                stamps.drained = ()
            stamps.received = stamps.scheduled = 0
            answer = [int(count == stamps.batch)] * count
            stamps.decided = time.monotonic_ns()
            return answer

    return PingPong(RouterContext(index, ("slm", "llm"), vocab_size, {}))
