"""Messages that the launcher only hands on between gateway and workers. Knows no tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from trserve.children import Child
from trserve.ipc.control import GATEWAY_IDENTITY, SOLVER_IDENTITY, ControlServer, Message

RELAYED: Final = ("flush_cache", "cache_flushed")


def relay(
    control: ControlServer, children: Iterable[Child], sender: Child, message: Message
) -> None:
    """Hand a gateway's message to the workers that serve, and a worker's to the gateway."""
    if sender.identity != GATEWAY_IDENTITY:
        control.send(GATEWAY_IDENTITY, message)
        return
    for child in children:
        if child.ready and child.identity not in (GATEWAY_IDENTITY, SOLVER_IDENTITY):
            control.send(child.identity, message)
