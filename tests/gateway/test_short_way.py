"""The short way of a token to its stream: it says what the long way says, or it is not taken."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gateway.stack import completion, letters, new_answer
from tests.gateway.test_sinks import Socket
from tests.workers.fakes import World, world
from trserve.gateway.dispatcher import FEW_STREAMS, Dispatcher, Job
from trserve.gateway.generation import Generation
from trserve.gateway.members import Extras
from trserve.gateway.prompts import Prompt
from trserve.gateway.sinks import StreamSink
from trserve.ipc.baton import Finish, SlotState, pack
from trserve.params import RequestParams, SamplingParams, encode_params

NAMES = ["m0", "m1"]
PROMPT = (1, 2, 3)
BLOB = encode_params(RequestParams(sampling=SamplingParams(temperature=0.0)))


class Stream:
    """A request of a stream, whose worker is this test."""

    def __init__(self, w: World, *, stops: tuple[str, ...] = (), **fields: Any) -> None:
        self._slab = w.slab
        self.socket = Socket()
        self._request = completion(stream=True, **fields)
        self._stops = stops
        self.length = len(PROMPT)
        self.long = 0

    def job(self) -> Job:
        return Job(prompt_ids=PROMPT, params=BLOB, limit=60, entry=0, start=self._start)

    def _start(self, slot: Any) -> Generation:
        request = self._request
        sink = StreamSink(request, Extras(request, NAMES), "trserve", self.socket, True)
        sink.open()
        self.generation = Generation(
            slab=self._slab,
            slot=slot,
            prompt_tokens=len(PROMPT),
            seed=0,
            answer=new_answer(len(NAMES), self._stops),
            sink=sink.choice(0, Prompt(list(PROMPT))),
            model_names=NAMES,
        )
        advance = self.generation.advance

        def counted(word: int) -> None:
            self.long += 1
            advance(word)

        self.generation.advance = counted  # type: ignore[method-assign]
        return self.generation

    def write(self, text: str, hop: int = 0, finish: Finish = Finish.NONE) -> None:
        slab, slot = self._slab, self.generation.slot.index
        tokens = letters(text)
        slab.tokens[slot, self.length : self.length + len(tokens)] = tokens
        slab.source[slot, self.length : self.length + len(tokens)] = [t % 2 for t in tokens]
        self.length += len(tokens)
        state = SlotState.DONE if finish else SlotState.LIVE
        slab.baton[slot] = pack(self.length, 0, state, finish, 0, hop)

    @property
    def events(self) -> list[Any]:
        body, texts = b"".join(self.socket.written), []
        while body:
            size, _, rest = body.partition(b"\r\n")
            length = int(size, 16)
            texts.append(rest[:length].decode())
            assert rest[length : length + 2] == b"\r\n"
            body = rest[length + 2 :]
        parts = "".join(texts).split("\n\n")[:-1]
        return [json.loads(part.removeprefix("data: ")) for part in parts if "[DONE]" not in part]

    @property
    def text(self) -> str:
        return "".join(e["choices"][0]["text"] for e in self.events)


pieces = st.lists(
    st.tuples(st.text("ABCDE", min_size=1, max_size=3), st.booleans(), st.integers(0, 3)),
    min_size=1,
    max_size=15,
)


def play(w: World, streams: list[Stream], gains: list[tuple[str, bool, int]]) -> None:
    async def story() -> None:
        dispatcher = Dispatcher(w.slab, w.slots, w.memory.bells[-1])
        await dispatcher.submit_all([stream.job() for stream in streams])
        for hop, (text, pauses, _) in enumerate(gains):
            for stream in streams:
                stream.socket.paused = pauses
                stream.write(text, hop)
            dispatcher.on_bell()
            for stream in streams if pauses else ():
                stream.socket.paused = False
                dispatcher.resume(stream.generation)
        for stream in streams:
            stream.write("Z", len(gains), Finish.LENGTH)
        dispatcher.on_bell()

    asyncio.run(story())


@settings(max_examples=40, deadline=None)
@given(pieces, st.sampled_from([1, FEW_STREAMS + 1]), st.booleans())
def test_any_way_says_the_same(gains: list[tuple[str, bool, int]], count: int, usage: bool) -> None:
    """One or several tokens at a time, with pauses, few streams or many."""
    with world(slots=2 * FEW_STREAMS) as w:
        streams = [Stream(w, continuous_usage_stats=usage) for _ in range(count)]
        play(w, streams, gains)
        whole = "".join(text for text, *_ in gains) + "Z"
        for stream in streams:
            assert stream.text == whole
            last = stream.events[-1]["choices"][0]
            assert last["finish_reason"] == "length"
            generation = stream.generation
            assert generation.usage()["completion_tokens"] == len(whole)
            assert list(generation.counts) == [
                sum(token % 2 == model for token in letters(whole)) for model in (0, 1)
            ]
            assert generation.handoffs == len(gains)


def test_one_token_at_a_time_takes_the_short_way() -> None:
    for count in (1, FEW_STREAMS + 1):
        with world(slots=2 * FEW_STREAMS) as w:
            streams = [Stream(w) for _ in range(count)]
            play(w, streams, [("A", False, 0)] * 10)
            # Where nothing is committed yet, the first token, and the end.
            assert [stream.long for stream in streams] == [3] * count


@pytest.mark.parametrize("fields", [{"trace": True}, {"return_token_ids": True}])
def test_where_more_is_said_the_long_way_is_taken(fields: dict[str, Any]) -> None:
    with world() as w:
        stream = Stream(w, **fields)
        play(w, [stream], [("A", False, 0)] * 5)
        assert stream.long == 7 and stream.text == "AAAAAZ"


def test_a_stop_string_is_found() -> None:
    with world() as w:
        stream = Stream(w, stops=("CD",))
        play(w, [stream], [(letter, False, 0) for letter in "ABCDE"])
        assert stream.text == "AB"
        assert stream.events[-1]["choices"][0]["finish_reason"] == "stop"
