"""Inside the worker of a standard-serving server: the time of a step's parts, by wrapping them.

It comes in as a router (``--router bench.std_stopwatch:Stopwatch``) that routes nothing; when it is
made it wraps the methods of the worker's classes, and when the worker ends it writes what they
took to the file that ``ENVIRONMENT`` names. The time of a part excludes that of the parts inside
it. The wrappers cost about a microsecond a call, which is in the numbers. Knows no HTTP.
"""

from __future__ import annotations

import atexit
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from trserve.emulated.runner import EmulatedRunner
from trserve.router_lib.base import RouterContext
from trserve.router_lib.none import NoRouter
from trserve.workers.blocks import BlockPool
from trserve.workers.runner import TorchRunner
from trserve.workers.step_cycle import StepCycle
from trserve.workers.table import RequestTable

ENVIRONMENT: Final = "BENCH_STD_STOPWATCH"
LEFT_OUT: Final = 20
"""Steps at the beginning: the prompt's, and what is done for the first time."""

PARTS: Final[tuple[tuple[type[Any], str, str], ...]] = (
    (BlockPool, "_cache_until", "cache update"),
    (BlockPool, "match", "prefix match"),
    (BlockPool, "extend", "lock"),
    (BlockPool, "release", "unlock"),
    (TorchRunner, "forward", "model"),
    (EmulatedRunner, "forward", "model"),
    (StepCycle, "run", "other"),
    (RequestTable, "sync", "other"),
)
"""Class, method and part. What is nearest to the lock of a radix tree's path is taking blocks
(a match counts one reference a block itself), to its unlock giving them back."""


class Stopwatch(NoRouter):
    """Routes nothing; its making begins the measurement."""

    def __init__(self, context: RouterContext) -> None:
        super().__init__(context)
        times = Times()
        for owner, method, part in PARTS:
            setattr(owner, method, times.timed(getattr(owner, method), part))
        atexit.register(times.write, Path(os.environ[ENVIRONMENT]))


class Times:
    """Seconds by part, each without those inside it."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.steps = 0
        self._inside = [0.0]

    def timed(self, call: Callable[..., Any], part: str) -> Callable[..., Any]:
        """``call``, with its time added to ``part``."""
        clock, inside = time.perf_counter, self._inside

        def wrapped(*args: Any, **named: Any) -> Any:
            inside.append(0.0)
            began = clock()
            try:
                return call(*args, **named)
            finally:
                took = clock() - began
                self.seconds[part] += took - inside.pop()
                inside[-1] += took
                if part == "model":
                    self._count()

        return wrapped

    def _count(self) -> None:
        self.steps += 1
        if self.steps == LEFT_OUT:
            self.seconds.clear()

    def write(self, path: Path) -> None:
        """Milliseconds a step, by part."""
        steps = self.steps - LEFT_OUT
        if steps > 0:
            path.write_text(json.dumps({k: 1e3 * v / steps for k, v in self.seconds.items()}))
