"""The router that routes nothing."""

from __future__ import annotations

from trserve.router_lib.base import BaseRouter, StepResult


class NoRouter(BaseRouter):
    """Every request stays where it is."""

    reads_model = False
    decides_early = True

    def route(self, result: StepResult) -> list[int]:
        """Stay."""
        return [0] * len(result.requests)
