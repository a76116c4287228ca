"""Messages that the launcher only hands on, between gateway and workers or among these.

Knows no tokens and no links.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from trserve.children import Child
from trserve.ipc.control import (
    GATEWAY_IDENTITY,
    SOLVER_IDENTITY,
    ControlServer,
    Message,
    worker_identity,
)

LINK_OFFER: Final = "link_offer"
RELAYED: Final = ("flush_cache", "cache_flushed", LINK_OFFER)


def relay(
    control: ControlServer, children: Iterable[Child], sender: Child, message: Message
) -> None:
    """Hand a gateway's message to the workers that serve, and a worker's to the gateway.

    What a worker says of its link to another goes to that one, if it serves; a worker that comes to
    it later makes an offer of its own, which is answered.
    """
    if message["type"] == LINK_OFFER:
        wanted = worker_identity(message["to"])
        for child in children:
            if child.ready and child.identity == wanted:
                control.send(wanted, message)
        return
    if sender.identity != GATEWAY_IDENTITY:
        control.send(GATEWAY_IDENTITY, message)
        return
    for child in children:
        if child.ready and child.identity not in (GATEWAY_IDENTITY, SOLVER_IDENTITY):
            control.send(child.identity, message)
