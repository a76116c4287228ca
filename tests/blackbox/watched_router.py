"""A router whose worker watches itself: nobody serializes after first contact, and bells ring once.

Loaded by a server's workers as ``--router tests.blackbox.watched_router:Watched``. From the first
routed step on, every way into pickle, json, orjson and msgspec raises, but while the parameters of
a request are decoded, which is its first contact. Writes to doorbells are counted between two
steps. What was seen stands in a file per worker, one line, rewritten at every step.
"""

from __future__ import annotations

import json
import os
import pickle
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
import orjson

import trserve.params
from trserve.router_lib.base import BaseRouter, RouterContext, StepResult
from trserve.workers import step_cycle, table

DIRECTORY = "WATCHED_ROUTER_DIRECTORY"
"""The environment variable that names where the workers report."""


@dataclass
class Seen:
    """What one worker saw of itself."""

    steps: int = 0
    routed_rows: int = 0
    first_contacts: int = 0
    serialized: int = 0
    bells: int = 0
    most_bells: int = 0
    """The most writes to one doorbell in one turn of the loop, with a step or without."""


class Watch:
    """The traps of this process."""

    def __init__(self, worker: int) -> None:
        self.seen = Seen()
        self.armed = False
        self._in_first_contact = False
        self._writes: Counter[int] = Counter()
        path = os.path.join(os.environ[DIRECTORY], f"worker-{worker}")
        self._report = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC)

    def set_traps(self) -> None:
        for module, names in (
            (pickle, ("dump", "dumps", "load", "loads", "Pickler", "Unpickler")),
            (json, ("dump", "dumps", "load", "loads", "JSONEncoder", "JSONDecoder")),
            (orjson, ("dumps", "loads")),
            (msgspec, ("convert", "to_builtins")),
            (msgspec.json, ("encode", "decode", "Encoder", "Decoder")),
            (msgspec.msgpack, ("encode", "decode", "Encoder", "Decoder")),
        ):
            for name in names:
                setattr(module, name, self._trap(getattr(module, name), f"{module}.{name}"))
        params: Any = trserve.params
        params._decoder = Trapped(self._trap(params._decoder.decode, "the parameters' decoder"))
        params._encoder = Trapped(self._trap(params._encoder.encode, "the parameters' encoder"))
        os.eventfd_write = self._counted(os.eventfd_write)
        table.decode_params = self._first_contact(table.decode_params)
        cycle: Any = step_cycle.StepCycle
        cycle.run = self._step(cycle.run)
        cycle.rest = self._turn(cycle.rest)

    def _trap(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def trapped(*args: Any, **kwargs: Any) -> Any:
            if self.armed and not self._in_first_contact:
                self.seen.serialized += 1
                self.report()
                raise AssertionError(f"{name} was called after first contact")
            return function(*args, **kwargs)

        return trapped

    def _first_contact(self, decode: Callable[..., Any]) -> Callable[..., Any]:
        def decoded(*args: Any) -> Any:
            self.seen.first_contacts += 1
            self._in_first_contact = True
            try:
                return decode(*args)
            finally:
                self._in_first_contact = False

        return decoded

    def _counted(self, write: Callable[[int, int], None]) -> Callable[[int, int], None]:
        def counted(fd: int, value: int) -> None:
            self._writes[fd] += 1
            write(fd, value)

        return counted

    def _step(self, run: Callable[..., None]) -> Callable[..., None]:
        def step(*args: Any) -> None:
            self.seen.steps += 1
            self._turn(run)(*args)

        return step

    def _turn(self, run: Callable[..., None]) -> Callable[..., None]:
        def turn(*args: Any) -> None:
            seen = self.seen
            seen.most_bells = max(seen.most_bells, *self._writes.values(), 0)
            seen.bells += self._writes.total()
            self._writes.clear()
            self.report()
            run(*args)

        return turn

    def report(self) -> None:
        line = " ".join(f"{name}={value}" for name, value in asdict(self.seen).items())
        os.pwrite(self._report, f"{line}\n".encode(), 0)


@dataclass
class Trapped:
    """In the place of an encoder or decoder that exists already."""

    call: Callable[..., Any]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in ("encode", "decode"):
            raise AttributeError(name)
        return self.call


class Watched(BaseRouter):
    """The large model writes every third position; watched."""

    def __init__(self, context: RouterContext) -> None:
        super().__init__(context)
        self._watch = Watch(context.model)
        self._watch.set_traps()

    def route(self, result: StepResult) -> list[int]:
        self._watch.armed = True
        leaves = [int(self.model or r.committed_len % 3 == 0) for r in result.requests]
        self._watch.seen.routed_rows += sum(leaves)
        return leaves


class Serializing(Watched):
    """One that does what must not be done."""

    def route(self, result: StepResult) -> list[int]:
        leaves = super().route(result)
        pickle.dumps(leaves)
        return leaves


def read_reports(directory: os.PathLike[str]) -> list[Seen]:
    """What each worker has seen so far."""
    found = []
    for path in sorted(os.listdir(directory)):
        with open(os.path.join(directory, path)) as file:
            fields = (field.split("=") for field in file.readline().split())
            found.append(Seen(**{name: int(value) for name, value in fields}))
    return found
