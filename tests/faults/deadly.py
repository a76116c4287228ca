"""A router that ends its process where a request asks for it; given to servers by its name."""

from __future__ import annotations

import os
from typing import Any

from trserve.router_lib.base import BaseRouter, PeerReq, StepResult

IN_ROUTE, IN_RECEIVE = 61, 62
"""The first token of a prompt that ends its worker, by where."""

AFTER = 6
"""Committed tokens after which ``route`` does."""


class DeadlyRouter(BaseRouter):
    """Two tokens a visit; ends the process for a prompt that begins with a marked token."""

    def route(self, result: StepResult) -> Any:
        for request in result.requests:
            row = request.token_ids
            if row[0] == IN_ROUTE and request.committed_len >= request.prompt_len + AFTER:
                os._exit(77)
        return [int(len(request.token_ids) % 3 == 0) for request in result.requests]

    def receive(self, peer_req: PeerReq) -> None:
        if IN_RECEIVE in peer_req.token_ids[:1].tolist():
            os._exit(78)
