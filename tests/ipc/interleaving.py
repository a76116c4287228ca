"""Every interleaving of processes over a simulated memory, and a crash after every prefix.

A process is a plain function that reads and writes :class:`Words`. To stop it at each access and
to go back, it is run again from its start: what it loaded before is given to it once more and what
it stored before is not stored again, until it comes to one access more than last time. A state is
the memory and what each process loaded; equal states are looked at once, so that the count is that
of the states and not of the schedules.

A load of a word that nobody else writes is no point at which others come between. Loads and
stores take effect in program order: what a processor may reorder is in ``trserve/ipc/fence.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Key = Hashable
Memory = dict[Key, Any]
Log = tuple[Any, ...]
MAX_STATES = 3_000_000


class Violation(AssertionError):
    """A schedule that must not be."""


class Paused(BaseException):  # no handler of the product may take it
    """The process has come to the access that it makes when it goes on."""

    def __init__(self, waits_for: Key | None) -> None:
        self.waits_for = waits_for


class Process:
    """One run of a process, along what it loaded before and one visible access further."""

    def __init__(
        self, memory: Memory, log: Log, *, moves: bool, visible: Callable[[Key], bool]
    ) -> None:
        self.memory = memory
        self.log = list(log)
        self._known = len(log)
        self._at = 0
        self._moves_left = int(moves)
        self._visible = visible

    def load(self, key: Key, *, private: bool = False) -> Any:
        hidden = private or not self._visible(key)
        return self._access(lambda: self.memory.get(key, 0), hidden=hidden)

    def store(self, key: Key, value: Any) -> None:
        hidden = not self._visible(key)
        self._access(lambda: self.memory.__setitem__(key, value), hidden=hidden)

    def wait(self, bell: Key) -> None:
        """Sleep until the bell has been rung, and take that back."""
        if self._replays():
            return
        if self._moves_left == 0 or not self.memory.get(bell, 0):
            raise Paused(bell)
        self._moves_left -= 1
        self.memory[bell] = 0
        self.log.append(None)

    def mark(self) -> int:
        """Where in its log the process is."""
        return self._at

    def rewind(self, mark: int) -> None:
        """Forget what came after ``mark``: the process is as it was there.

        Without this, each look that finds nothing would make another state.
        """
        del self.log[mark:]
        self._at, self._known = mark, min(self._known, mark)

    def _replays(self) -> bool:
        self._at += 1
        return self._at <= self._known

    def _access(self, act: Callable[[], Any], *, hidden: bool) -> Any:
        if self._replays():
            return self.log[self._at - 1]
        if not hidden:
            if self._moves_left == 0:
                raise Paused(None)
            self._moves_left -= 1
        value = act()
        self.log.append(value)
        return value


@dataclass(frozen=True)
class Words:
    """An array of shared words as one process sees it; of the product's views, what it uses."""

    process: Process
    name: Key
    length: int
    private: Container[int] = ()
    """Where nobody else writes: to load from there is no point at which others come between."""

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [self[index] for index in range(*at.indices(self.length))]
        if not 0 <= at < self.length:
            raise IndexError(at)
        return self.process.load((self.name, at), private=at in self.private)

    def __setitem__(self, at: Any, value: Any) -> None:
        if isinstance(at, np.ndarray):
            values = np.broadcast_to(value, at.shape).tolist()
            for index, one in zip(at.tolist(), values, strict=True):
                self[index] = one
        else:
            self.process.store((self.name, at), int(value))


def _nothing(key: Key) -> bool:
    return False


@dataclass(frozen=True)
class State:
    """The memory, and of each process its log and the bell that it sleeps on, if it does."""

    memory: frozenset[tuple[Key, Any]]
    processes: tuple[tuple[Log, Key | None], ...]
    crashes_left: int


Program = Callable[[Process], None]


@dataclass
class Explorer:
    """Looks at every state that processes can come to.

    Args:
        programs: the processes; each runs for ever, sleeping on bells.
        memory: at the start.
        check: raises Violation for a memory that must not be, at any time.
        check_end: the same for one in which everybody sleeps.
        victims: those that may end at any point and are then started anew.
        crashes: how many of them end in one schedule.
        on_crash: what a launcher does once it has reaped one.
        whole_turns: those that others interrupt only where they sleep.
        visible: the words at whose loads and stores others come between.
    """

    programs: Sequence[Program]
    memory: Memory
    check: Callable[[Memory], None]
    check_end: Callable[[Memory], None]
    victims: Sequence[int] = ()
    crashes: int = 0
    on_crash: Callable[[Memory], None] = lambda memory: None
    whole_turns: frozenset[int] = frozenset()
    visible: Callable[[Key], bool] = lambda key: True
    states: int = 0
    ends: int = 0
    _seen: set[State] = field(default_factory=set)

    def run(self) -> None:
        """Raises Violation if any schedule breaks a rule."""
        memory = dict(self.memory)
        started = tuple(self._run(index, memory, (), moves=False) for index in range(self._count))
        todo = [State(frozenset(memory.items()), started, self.crashes)]
        self._seen.update(todo)
        while todo:
            state = todo.pop()
            self.states += 1
            assert self.states < MAX_STATES, "more states than this checker is for"
            for following in self._after(state):
                if following not in self._seen:
                    self._seen.add(following)
                    todo.append(following)

    @property
    def _count(self) -> int:
        return len(self.programs)

    def _after(self, state: State) -> Iterator[State]:
        asleep = True
        for index, (log, bell) in enumerate(state.processes):
            memory = dict(state.memory)
            if bell is None or memory.get(bell, 0):
                asleep = False
                ran = self._run(index, memory, log, moves=True)
                self.check(memory)
                yield self._state(state, memory, index, ran)
        if asleep:
            self.ends += 1
            self.check_end(dict(state.memory))
        if state.crashes_left:
            for index in self.victims:
                memory = dict(state.memory)
                self.on_crash(memory)
                ran = self._run(index, memory, (), moves=False)
                yield self._state(state, memory, index, ran, crashes=1)

    @staticmethod
    def _state(
        before: State, memory: Memory, index: int, ran: tuple[Log, Key | None], crashes: int = 0
    ) -> State:
        processes = (*before.processes[:index], ran, *before.processes[index + 1 :])
        return State(frozenset(memory.items()), processes, before.crashes_left - crashes)

    def _run(self, index: int, memory: Memory, log: Log, *, moves: bool) -> tuple[Log, Key | None]:
        visible = _nothing if index in self.whole_turns else self.visible
        process = Process(memory, log, moves=moves, visible=visible)
        try:
            self.programs[index](process)
        except Paused as paused:
            return tuple(process.log), paused.waits_for
        raise Violation("a process ended by itself")
