"""A router that takes its time to load, so that a server can be seen while its models load."""

from __future__ import annotations

import time

from trserve.router_lib.base import BaseRouter, StepResult

LOADS_FOR_S = 4.0
time.sleep(LOADS_FOR_S)


class Slow(BaseRouter):
    """Nobody is handed on."""

    def route(self, result: StepResult) -> list[int]:
        return [0] * len(result.requests)
