"""The usage of many choices in every event: what asking all would say, at the cost of one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gateway.stack import letters, new_answer
from tests.gateway.test_message_parts import TOOLS
from tests.gateway.test_sinks import Socket, events
from tests.workers.fakes import World, world
from trserve.gateway.generation import Generation
from trserve.gateway.members import Extras
from trserve.gateway.message_parts import part_splitter
from trserve.gateway.message_sinks import MessageStream
from trserve.gateway.prompts import Prompt
from trserve.gateway.requests import GenerationRequest
from trserve.gateway.responses import UsageTotal, total_usage, usage_dict
from trserve.gateway.sinks import StreamSink
from trserve.ipc.baton import Baton, Finish, SlotState
from trserve.ipc.extras import write_extras

NAMES = ["small", "large"]
PROMPT = [1, 2, 3]


def asked_of_all(parts: list[dict[str, Any]], n: int) -> dict[str, Any]:
    """The usage of a response by its definition."""
    own = [part["trserve"] for part in parts]
    tokens = {name: sum(each["tokens"][name] for each in own) for name in NAMES}
    total = sum(tokens.values())
    trserve = {
        "tokens": tokens,
        "handoffs": sum(each["handoffs"] for each in own),
        "share": tokens["large"] / total if total else 0.0,
        "pending_ms": sum(each["pending_ms"] for each in own),
        "degraded": any(each["degraded"] for each in own),
        "seed": own[0]["seed"],
    }
    if len(parts) > n:
        trserve["seeds"] = [each["seed"] for each in own[::n]]
    firsts = parts[::n]
    cached = sum(part["prompt_tokens_details"]["cached_tokens"] for part in firsts)
    return usage_dict(sum(part["prompt_tokens"] for part in firsts), total, trserve, cached)


def part(small: int, large: int, handoffs: int, ended: float, degraded: bool, cached: int) -> Any:
    total = small + large
    own = {
        "tokens": {"small": small, "large": large},
        "handoffs": handoffs,
        "share": large / total if total else 0.0,
        "pending_ms": ended,
        "degraded": degraded,
        "seed": 7 * small,
    }
    return usage_dict(4, total, own, cached)


COUNTS = st.integers(0, 50)
PENDING = st.floats(0, 1e4)
PARTS = st.builds(part, COUNTS, COUNTS, COUNTS, PENDING, st.booleans(), COUNTS)


@given(st.integers(1, 3), st.integers(1, 4), st.data())
def test_a_total_is_that_of_the_parts_as_they_are(
    n: int, prompts: int, data: st.DataObject
) -> None:
    parts = [data.draw(PARTS) for _ in range(n * prompts)]
    seeds = [each["trserve"]["seed"] for each in parts]
    total = UsageTotal(parts, n)
    for _ in range(data.draw(st.integers(0, 8))):
        index = data.draw(st.integers(0, len(parts) - 1))
        parts[index] = data.draw(PARTS)
        parts[index]["trserve"]["seed"] = seeds[index]  # the one thing that never changes
        total.replace(index, parts[index])
        assert orjson.dumps(total.usage()) == orjson.dumps(asked_of_all(parts, n))
        if len(parts) > 1:
            assert total_usage(parts, n) == total.usage()


class Choices:
    """Answers that share a stream, whose workers are this test."""

    def __init__(self, w: World, kind: str, prompts: int, n: int) -> None:
        self._w = w
        self.socket = Socket()
        shape: Any = {"kind": "completion", "prompts": [PROMPT] * prompts}
        if kind == "chat":
            shape = {"kind": "chat", "tools": TOOLS}
        self.request = GenerationRequest(
            **shape, n=n, stream=True, include_usage=True, continuous_usage_stats=True
        )
        self.sink = self._new_sink(kind)
        self.sink.open()
        self.degraded = False
        self.words = [Baton(len(PROMPT), 0, SlotState.LIVE, Finish.NONE, 0, 0)] * prompts * n
        places = [self.sink.choice(index, Prompt(PROMPT)) for index in range(prompts * n)]
        self.generations = [self._start(index, place) for index, place in enumerate(places)]

    def _new_sink(self, kind: str) -> StreamSink:
        extras = Extras(self.request, NAMES)
        if kind == "completion":
            return StreamSink(self.request, extras, "m", self.socket, False)
        splitter = lambda prompt: part_splitter(self.request, prompt.text, reasons=False)  # noqa: E731
        return MessageStream(self.request, extras, "m", self.socket, False, splitter)

    def _start(self, index: int, place: Any) -> Generation:
        return Generation(
            slab=self._w.slab,
            slot=self._w.submit(PROMPT, limit=60),
            prompt_tokens=len(PROMPT),
            seed=index,
            answer=new_answer(),
            sink=place,
            model_names=NAMES,
            degraded=lambda: self.degraded,
        )

    def gain(
        self, index: int, text: str, *, hops: int = 0, source: int = 0, pending_us: int = -1
    ) -> None:
        """Commit ``text``, after ``hops`` moves; it is all if there is a ``pending_us``."""
        slab, old, row = self._w.slab, self.words[index], self.generations[index].slot.index
        end = old.length + len(text)
        slab.tokens[row, old.length : end] = letters(text)
        slab.source[row, old.length : end] = source
        slab.cached[row] = row
        state, finish = SlotState.LIVE, Finish.NONE
        if pending_us >= 0:
            state, finish = SlotState.DONE, Finish.LENGTH
            write_extras(slab.extras(row, 0), 0, 1000 * pending_us, False, end)
        word = Baton(end, source, state, finish, 0, old.hop + hops)
        self.words[index] = word
        slab.baton[row] = word.pack()
        self.generations[index].advance(word.pack())

    @property
    def usages(self) -> list[Any]:
        """Those of the events so far."""
        return [event["usage"] for event in self.events]

    @property
    def events(self) -> list[Any]:
        return [event for event in events(self.socket) if event != "[DONE]"]

    def now(self) -> Any:
        """What asking all of them says."""
        parts = [generation.usage() for generation in self.generations]
        return json.loads(orjson.dumps(asked_of_all(parts, self.request.n)))


@contextmanager
def answering(kind: str, prompts: int, n: int) -> Iterator[Choices]:
    with world(slots=prompts * n) as w:
        loop = asyncio.new_event_loop()
        try:

            async def make() -> Choices:
                return Choices(w, kind, prompts, n)

            yield loop.run_until_complete(make())
        finally:
            loop.close()


STEPS = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.text("ABCD", min_size=1, max_size=3),
        st.integers(0, 2),
        st.integers(0, 1),
        st.sampled_from([-1, -1, 0, 1_100, 2_200_300]),
        st.booleans(),
    ),
    max_size=15,
)


@settings(deadline=None)
@given(st.sampled_from([("completion", 4, 1), ("completion", 2, 2), ("chat", 1, 4)]), STEPS)
def test_each_event_has_the_usage_of_all(shape: tuple[str, int, int], steps: list[Any]) -> None:
    with answering(*shape) as choices:
        for index, text, hops, source, pending_us, lost in steps:
            if choices.generations[index].ended:
                continue
            choices.degraded |= lost
            seen = len(choices.usages)
            choices.gain(index, text, hops=hops, source=source, pending_us=pending_us)
            new = choices.usages[seen:]
            assert new and all(usage == choices.now() for usage in new)


def test_a_move_is_told_with_the_token_that_follows_it() -> None:
    with answering("completion", 2, 1) as choices:
        choices.gain(0, "A")
        choices.gain(1, "", hops=3)
        choices.gain(0, "B")
        assert choices.usages[-1]["trserve"]["handoffs"] == 0
        choices.gain(1, "C")
        assert choices.usages[-1] == choices.now()
        assert choices.usages[-1]["trserve"]["handoffs"] == 3


def test_the_last_usage_is_asked_of_all() -> None:
    with answering("completion", 2, 1) as choices:
        choices.gain(0, "A", pending_us=5)
        choices.gain(1, "B", hops=2, source=1, pending_us=7_000)
        *_, before, last = choices.events
        assert last["choices"] == [] and last["usage"] == before["usage"] == choices.now()


@pytest.mark.parametrize(("kind", "prompts", "n"), [("completion", 64, 1), ("chat", 1, 64)])
def test_an_event_asks_one_choice_and_not_all(
    monkeypatch: pytest.MonkeyPatch, kind: str, prompts: int, n: int
) -> None:
    asked = 0
    real = Generation.usage

    def counted(self: Generation) -> dict[str, Any]:
        nonlocal asked
        asked += 1
        return real(self)

    monkeypatch.setattr(Generation, "usage", counted)
    with answering(kind, prompts, n) as choices:
        for turn, most in enumerate((2 * 64, 64, 64)):
            asked = 0
            for index in range(64):
                choices.gain(index, "A")
            assert 64 <= asked <= most
            assert len(choices.usages) == 64 * (turn + 1)
