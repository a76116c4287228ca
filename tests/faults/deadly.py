"""A router that ends its process where a request asks for it; given to servers by its name."""

from __future__ import annotations

import os
from typing import Any

from trserve.router_lib.base import BaseRouter, PeerReq, RouterContext, StepResult
from trserve.workers.runner import ForwardOutput, TorchRunner
from trserve.workers.step import StepInputs

IN_ROUTE, IN_RECEIVE, IN_PROMPT = 61, 62, 63
"""The first token of a prompt that ends its worker, by where; the last at model 1 alone."""

AFTER = 6
"""Committed tokens after which ``route`` does."""


class DeadlyRouter(BaseRouter):
    """Two tokens a visit; ends the process for a prompt that begins with a marked token.

    One that would end it by its prompt never leaves model 0, so that nobody else need compute it.
    """

    def __init__(self, context: RouterContext) -> None:
        super().__init__(context)
        if context.model == 1:
            forward = TorchRunner.forward

            def deadly(runner: TorchRunner, step: StepInputs, *also: Any) -> ForwardOutput:
                starts = step.query_start[: step.num_rows]
                if (step.token_ids[starts] == IN_PROMPT)[step.positions[starts] == 0].any():
                    os._exit(79)
                return forward(runner, step, *also)

            TorchRunner.forward = deadly  # type: ignore[method-assign]

    def route(self, result: StepResult) -> Any:
        for request in result.requests:
            row = request.token_ids
            if row[0] == IN_ROUTE and request.committed_len >= request.prompt_len + AFTER:
                os._exit(77)
        rows = [request.token_ids for request in result.requests]
        return [int(len(row) % 3 == 0 and row[0] != IN_PROMPT) for row in rows]

    def receive(self, peer_req: PeerReq) -> None:
        if IN_RECEIVE in peer_req.token_ids[:1].tolist():
            os._exit(78)
