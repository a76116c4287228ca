"""Starts ``tests.ipc.device.peer`` and talks with it; two workers of one slab, each a process."""

from __future__ import annotations

import json
import select
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tests.ipc.memory import Memory, memory

LONG_S = 60.0


class Peer:
    """A process that plays ``role``."""

    def __init__(self, role: str, *arguments: str, fds: Sequence[int] = ()) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.ipc.device.peer", role, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=tuple(fds),
        )

    def tell(self, message: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message).encode() + b"\n")
        self.process.stdin.flush()

    def hear(self) -> Any:
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], LONG_S)[0], "it said nothing"
        line = self.process.stdout.readline()
        assert line, f"it ended with {self.process.wait(LONG_S)}"
        return json.loads(line)

    def ask(self, message: Any) -> Any:
        self.tell(message)
        return self.hear()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(LONG_S)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


@contextmanager
def peer(role: str, *arguments: str, fds: Sequence[int] = ()) -> Iterator[Peer]:
    made = Peer(role, *arguments, fds=fds)
    try:
        yield made
    finally:
        made.kill()


def layout_of(shared: Memory) -> str:
    layout = shared.layout
    return json.dumps([layout.slots, layout.row_tokens, layout.workers])


def sender_of(shared: Memory, medium: str, first: int, last: int) -> Peer:
    """Worker 0 as a process that hands over generations ``first`` to ``last``."""
    arguments = (medium, str(shared.fd), layout_of(shared), json.dumps(shared.bells))
    return Peer("sender", *arguments, str(first), str(last), fds=(shared.fd, *shared.bells))


def receiver_of(shared: Memory, medium: str) -> Peer:
    """Worker 1 as a process that takes what comes."""
    return Peer("receiver", medium, str(shared.fd), layout_of(shared), fds=(shared.fd,))


def introduce(medium: Any, other: Peer) -> None:
    """What the launcher does: hand the offers of each to the other until nobody answers."""
    hers = other.hear()
    mine = [offer for offer in medium.offers() if offer["to"] != medium._index]
    for _ in range(4):
        answers = other.ask(mine) if mine else []
        mine = [answer for offer in hers for answer in medium.accept(offer)]
        hers = answers
        if not mine and not hers:
            return
    raise AssertionError("they never stop answering each other")


__all__ = ["Peer", "introduce", "memory", "peer", "receiver_of", "sender_of"]
