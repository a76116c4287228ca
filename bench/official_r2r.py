"""R2R's own way to run, its two workers: each polls its queue, and a message carries each token.

As the original's patched engine does it: the small model's worker decodes all that it has, and
sends what is routed, with what the peer has not seen of the row; the large model's worker makes a
new request of every message (the whole row is detokenised, which nobody reads, and its list of KV
slots becomes a tensor), extends it by one token and sends that back. KV stays on both sides. A step
starts whenever there is anything. Steps take an emulated profile's time, from when the batch is
there, and tokens are made up; what surrounds steps is real. Knows no user and no transport.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

import torch

from trserve.emulated.clock import set_timer_slack, wait_until
from trserve.emulated.profile import load_profile
from trserve.emulated.runner import StepClock
from trserve.gateway.tokenizer import Tokenizer

MAX_ROWS: Final = 512
NEED: Final = "need"
NEW: Final = "new"
FINISHED: Final = "finished"
SHUTDOWN: Final = "shutdown"
OWN: Final = 0
OTHERS: Final = 1
HANDOFFS: Final = 2
"""Of the counters: tokens of the small model, of the large one, and moves between them."""

_SAMPLING: Final = {"temperature": 0.0, "top_k": 1, "top_p": 1.0, "max_new_tokens": 1}
_FIRST_ID: Final = 16
_IDS: Final = 480


class Message(NamedTuple):
    """What the workers send each other of a request, in lists."""

    rid: int
    token_ids: list[int]
    status: str = NEED
    sampling: dict[str, float] | None = None


class Task(NamedTuple):
    """A request as the controller gives it to the small model's worker."""

    rid: int
    prompt: list[int]
    max_tokens: int


class News(NamedTuple):
    """What the controller hears of a request: its first token, or its end with its ids."""

    rid: int
    at_s: float
    token_ids: list[int] | None = None


@dataclass
class _Small:
    """A request at the small model; ``known_to_peer``: length of the row that was sent."""

    rid: int
    row: list[int]
    prompt: int
    limit: int
    dice: random.Random
    computed: int = 0
    known_to_peer: int = 0


def made_up(rid: int, position: int) -> int:
    """A token, the same in every run."""
    return _FIRST_ID + (rid * 7919 + position * 31) % _IDS


class SmallSide:
    """The small model's worker between two steps; ``p``: the share of its tokens it hands on."""

    def __init__(self, p: float, counters: Any) -> None:
        self._p = p
        self._counters = counters
        self._running: dict[int, _Small] = {}
        self._pending: dict[int, _Small] = {}
        self._output_ids = torch.zeros(0, dtype=torch.int64)

    def add(self, task: Task) -> list[Message]:
        """A new request; returns what the peer has to hear of it."""
        dice = random.Random(f"r2r {task.rid}")
        row = list(task.prompt)
        limit = len(row) + task.max_tokens
        self._running[task.rid] = _Small(task.rid, row, len(row), limit, dice)
        return [Message(task.rid, [], NEW)]

    def receive(self, messages: Sequence[Message]) -> tuple[list[Message], list[News]]:
        """Tokens of the large model; returns what ends by them, for the peer and the controller."""
        ended, news = [], []
        for message in messages:
            request = self._pending.pop(message.rid)
            self._running[message.rid] = request
            self._counters[OTHERS] += 1
            self._counters[HANDOFFS] += 1
            news += self._append(request, message.token_ids[0])
            # It has its own token.
            request.known_to_peer = len(request.row)
            ended += self._end(request)
        if messages:
            self._rebuild()
        return ended, news

    def shape(self) -> tuple[int, int]:
        """Rows of the next step, and the tokens that it computes."""
        running = self._running.values()
        return len(running), sum(len(each.row) - each.computed for each in running)

    def step(self) -> tuple[list[Message], list[News]]:
        """One step over all that runs; returns the messages to the peer and the news."""
        sent, news = [], []
        for request in list(self._running.values()):
            request.computed = len(request.row)
            token = made_up(request.rid, len(request.row))
            if request.dice.random() < self._p:
                sent.append(self._hand_on(request))
                continue
            self._counters[OWN] += 1
            news += self._append(request, token)
            sent += self._end(request)
        self._rebuild()
        return sent, news

    def _hand_on(self, request: _Small) -> Message:
        del self._running[request.rid]
        self._pending[request.rid] = request
        self._counters[HANDOFFS] += 1
        unknown = request.row[request.known_to_peer :]
        request.known_to_peer = len(request.row)
        return Message(request.rid, unknown, NEED, _SAMPLING)

    def _append(self, request: _Small, token: int) -> list[News]:
        request.row.append(token)
        written = len(request.row) - request.prompt
        at = time.perf_counter()
        first = [News(request.rid, at)] if written == 1 else []
        is_last = len(request.row) >= request.limit
        return first + ([News(request.rid, at, request.row[request.prompt :])] if is_last else [])

    def _end(self, request: _Small) -> list[Message]:
        if len(request.row) < request.limit:
            return []
        del self._running[request.rid]
        return [Message(request.rid, [], FINISHED)]

    def _rebuild(self) -> None:
        """The whole batch's last tokens, as the original makes them after every change."""
        self._output_ids = torch.tensor([each.row[-1] for each in self._running.values()])


@dataclass
class _Large:
    """A request at the large model: its row, and where its KV lies."""

    rid: int
    row: list[int]
    slots: list[int]
    text: str = ""
    index: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))


class LargeSide:
    """The large model's worker between two steps; ``detokenise`` turns ids into text."""

    def __init__(self, detokenise: Callable[[Sequence[int]], str]) -> None:
        self._detokenise = detokenise
        self._rows: dict[int, list[int]] = {}
        self._slots: dict[int, list[int]] = {}
        self._next_slot = 0
        self._waiting: list[_Large] = []

    def receive(self, messages: Sequence[Message]) -> None:
        """Take in what came: requests that need a token, and that others have ended.

        That one has begun only counts for batch sizes to wait for, of which there are none here.
        """
        for message in messages:
            if message.status == FINISHED:
                self._rows.pop(message.rid, None)
                self._slots.pop(message.rid, None)
            elif message.status == NEED:
                self._waiting.append(self._rebuild(message))

    def _rebuild(self, message: Message) -> _Large:
        row = self._rows.setdefault(message.rid, [])
        row += message.token_ids
        slots = self._slots.setdefault(message.rid, [])
        request = _Large(message.rid, list(row), slots)
        request.text = self._detokenise(request.row)
        request.index = torch.tensor(slots, dtype=torch.int64)
        return request

    def shape(self) -> tuple[int, int]:
        """Rows of the next step, and the tokens that it computes."""
        return len(self._waiting), sum(len(each.row) - len(each.slots) for each in self._waiting)

    def step(self) -> list[Message]:
        """Extend all that waits by one token each."""
        waiting, self._waiting = self._waiting, []
        answers = []
        for request in waiting:
            new = len(request.row) - len(request.slots)
            request.slots += torch.arange(self._next_slot, self._next_slot + new).tolist()
            self._next_slot += new
            token = made_up(request.rid, len(request.row))
            self._rows[request.rid].append(token)
            answers.append(Message(request.rid, [token]))
        return answers


class SmallEnds(Protocol):
    """What the small model's worker is joined to others by; nothing here waits."""

    counters: Any

    def tasks(self) -> list[Task] | None:
        """New requests; None once the worker is to end."""

    def inbox(self) -> list[Message]:
        """What the large model's worker has sent."""

    def send(self, messages: list[Message]) -> None:
        """To the large model's worker, in one list; nothing if it is empty."""

    def tell(self, news: list[News]) -> None:
        """To the controller."""


class LargeEnds(Protocol):
    """The large model's worker's."""

    def inbox(self) -> list[Message] | None:
        """What the small model's worker has sent; None once the worker is to end."""

    def send(self, messages: list[Message]) -> None:
        """To the small model's worker, in one list; nothing if it is empty."""


class Pace:
    """Steps of a profile's model, and pauses of a worker that finds nothing to do."""

    PAUSE_S: Final = 1e-4

    def __init__(self, profile: str, model: str) -> None:
        found = load_profile(profile).model(model)
        assert found is not None, f"{profile} has no {model}"
        self._clock = StepClock(found, MAX_ROWS)
        set_timer_slack()

    def compute(self, began_ns: int, rows: int, tokens: int) -> None:
        """Return when a step that began then is over."""
        wait_until(began_ns + self._clock.duration_ns(rows, tokens), _nothing)

    def pause(self) -> None:
        """Let others have the core for a moment: on cores of its own the original only polls."""
        time.sleep(self.PAUSE_S)


def _nothing() -> None:
    """No sign of life is needed."""


def run_small(ends: SmallEnds, profile: str, model: str, p: float) -> None:
    """The small model's worker process, until it is told to end."""
    side, pace = SmallSide(p, ends.counters), Pace(profile, model)
    while (tasks := ends.tasks()) is not None:
        out, news = side.receive(ends.inbox())
        for task in tasks:
            out += side.add(task)
        began = time.monotonic_ns()
        rows, tokens = side.shape()
        if rows:
            ends.send(out)
            pace.compute(began, rows, tokens)
            out, more = side.step()
            news += more
        ends.send(out)
        ends.tell(news)
        if not rows and not tasks:
            pace.pause()


def run_large(ends: LargeEnds, profile: str, model: str) -> None:
    """The large model's worker process, until it is told to end."""
    from trserve.demo import model_path

    decode = Tokenizer.load(model_path("tiny")).decode
    side = LargeSide(partial(decode, skip_special_tokens=False))
    pace = Pace(profile, model)
    while (messages := ends.inbox()) is not None:
        side.receive(messages)
        began = time.monotonic_ns()
        rows, tokens = side.shape()
        if rows:
            pace.compute(began, rows, tokens)
            ends.send(side.step())
        elif not messages:
            pace.pause()
