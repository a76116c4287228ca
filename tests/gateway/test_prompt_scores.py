"""A long prompt's annotations come in parts, all of them and each once, while others have turns."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.gateway.small_tokenizers import byte_level
from tests.gateway.stack import ListSink, completion, new_dispatcher, new_job
from tests.gateway.test_dispatcher import endless, play, work
from tests.workers.fakes import world
from trserve.errors import RequestError
from trserve.gateway.answer import Delta
from trserve.gateway.detokenizer import Detokenizer
from trserve.gateway.generation import AT_A_TURN
from trserve.gateway.logprobs import CompletionLogprobs, TokenNames
from trserve.gateway.members import Extras, Members
from trserve.gateway.prompts import Prompt
from trserve.gateway.responses import usage_dict
from trserve.gateway.sglang import Ask
from trserve.gateway.sglang_responses import Shown, Style
from trserve.gateway.tokenizer import Tokenizer
from trserve.ipc.annotations import Annotation

TOKENIZER = Tokenizer(byte_level(), named={})
NAMES = TokenNames(TOKENIZER)
LONG = 4 * AT_A_TURN + 10
ROOMY: dict[str, Any] = {"row_tokens": 512, "workers": 1, "token": endless, "num_blocks": 400}


def prompt_of(length: int) -> tuple[int, ...]:
    return tuple(n % 40 + 1 for n in range(length))


def is_whole(sink: ListSink, prompt: Sequence[int]) -> bool:
    """Whether the most probable token of every position of ``prompt`` was given, in order."""
    parts = [delta.prompt_annotations or () for delta in sink.deltas]
    given_ids = [annotation.top_ids[0] for part in parts for annotation in part]
    return given_ids == [endless(0, prompt[:at]) for at in range(1, len(prompt))]


async def turns_until(over: Any, most: int = 1000) -> int:
    for turn in range(most):
        if over():
            return turn
        await asyncio.sleep(0)
    raise AssertionError("it takes too many turns")


@pytest.mark.parametrize("length", [1, 2, AT_A_TURN, AT_A_TURN + 1, AT_A_TURN + 2, LONG])
def test_every_position_is_given_once_and_a_turn_takes_only_so_many(length: int) -> None:
    async def story() -> None:
        with world(slots=1, **ROOMY) as w:
            d, sink, prompt = new_dispatcher(w), ListSink(), prompt_of(length)
            await d.submit(new_job(w, sink, prompt=prompt, limit=length + 3, tops=1))
            work(w, d, 20)
            await turns_until(lambda: sink.finish_reason)
            parts = [len(delta.prompt_annotations or ()) for delta in sink.deltas]
            assert max(parts) <= AT_A_TURN and sum(parts) == length - 1
            assert is_whole(sink, prompt)
            assert [len(d.annotations) for d in sink.deltas] == [
                len(d.token_ids) for d in sink.deltas
            ]
            assert len(sink.ids) == 3
            assert (d.num_live, w.slots.num_free) == (0, 1)

    play(story())


def test_others_have_their_turns_meanwhile() -> None:
    """Tokens of another stream come between any two parts, whoever of several they are for."""

    async def story() -> None:
        with world(slots=4, max_tokens=1024, **ROOMY) as w:
            d, other, sinks = new_dispatcher(w), ListSink(), [ListSink() for _ in range(3)]
            await d.submit(new_job(w, other, limit=60))
            prompt, bounds = prompt_of(LONG), {"limit": LONG + 200, "tops": 1}
            for sink in sinks:
                await d.submit(new_job(w, sink, prompt=prompt, **bounds))
            while not all(sink.deltas for sink in sinks):
                work(w, d)  # whose bells bring a first part
            parts = 3
            while not all(sink.ids for sink in sinks):
                w.workers[0].turn()
                count = len(other.ids)
                await asyncio.sleep(0)
                now = sum(len(sink.deltas) for sink in sinks)
                assert now - parts <= 1, "two parts in one turn of the loop"
                parts = now
                d._catch_up(next(iter(d.live)))
                assert len(other.ids) > count
            assert all(is_whole(sink, prompt) for sink in sinks)
            for generation in tuple(d.live):
                d.cancel(generation)

    play(story())


@pytest.mark.parametrize("how", ["cancel", "fail_all", "abort", "bug", "paused"])
def test_whatever_ends_it_between_two_parts(how: str) -> None:
    async def story() -> None:
        with world(slots=1, **ROOMY) as w:
            d, sink, prompt = new_dispatcher(w), ListSink(), prompt_of(LONG)
            job = new_job(w, sink, prompt=prompt, limit=LONG + 3, tops=1)
            generation = await d.submit(job)
            for _ in range(100):
                work(w, d)
                if sink.deltas:
                    break
            assert len(sink.deltas) == 1 and not sink.ids
            if how == "cancel":
                d.cancel(generation)
                await turns_until(lambda: w.slots.num_free or work(w, d))
                assert len(sink.deltas) == 1
            elif how == "fail_all":
                d.fail_all(RequestError("lost", status=503))
                assert is_whole(sink, prompt) and len(sink.ids) == 1
                assert sink.error is not None
            elif how == "abort":
                d.abort(generation)
                work(w, d, 2)
                await turns_until(lambda: sink.finish_reason)
                assert sink.finish_reason == "abort" and is_whole(sink, prompt)
            elif how == "bug":
                sink.breaks = True
                await turns_until(lambda: sink.error)
                assert sink.error is not None and sink.error.status == 500
            else:
                sink.paused = True
                await asyncio.sleep(0.05)
                given_then = len(sink.deltas)
                await asyncio.sleep(0.05)
                assert len(sink.deltas) == given_then < LONG // AT_A_TURN
                assert not asyncio.get_running_loop()._ready, "it asks again and again"  # type: ignore[attr-defined]
                sink.paused = False
                d.resume(generation)
                await turns_until(lambda: sink.finish_reason or work(w, d))
                assert is_whole(sink, prompt)
            work(w, d, 3)
            assert (d.num_live, d.num_closing, w.slots.num_free) == (0, 0, 1)
            w.check_nothing_held()

    play(story())


@given(st.integers(0, 30), st.lists(st.integers(1, 29), max_size=4), st.integers(1, 5))
def test_parts_are_shown_as_the_whole(scored: int, cuts: list[int], start: int) -> None:
    """Also of a prompt that an abort left without its end."""
    ids = [n + 3 for n in range(31)]
    whole = [Annotation(-float(n), [n + 4, 9], [-float(n), -9.0]) for n in range(scored)]
    places = sorted({cut for cut in cuts if cut < scored})
    parts = [whole[begin:end] for begin, end in zip([0, *places], [*places, scored], strict=True)]
    last = Delta("x", [40], [0], "stop", None, [Annotation(-1.0, [40], [-1.0])], parts[-1])
    early = [Delta("", [], [], None, None, prompt_annotations=part) for part in parts[:-1]]
    assert shown([*early, last], ids, start) == shown(
        [last._replace(prompt_annotations=whole)], ids, start
    )


def shown(deltas: list[Delta], ids: list[int], start: int) -> list[Any]:
    """As OpenAI's route shows them and as SGLang's does."""
    logprobs = CompletionLogprobs(NAMES, Detokenizer(TOKENIZER, []), ids)
    members = Members(Extras(completion(), ["m0"]), logprobs)
    ask = Ask("", 2, start - 1, True)
    answer = Shown(ask, "a", Prompt(ids), Style(NAMES, ["m0"]), trace=False)
    answer.usage = lambda: usage_dict(len(ids), 1, {}, 0)
    for delta in deltas:
        members.add(delta)
        answer.add(delta)
    meta = answer.show()["meta_info"]
    del meta["e2e_latency"]
    found = json.loads(members.take()[1])
    assert len(found["tokens"]) == len(ids) + 1 == len(found["text_offset"])
    assert json.loads(members.take()[1])["tokens"] == []
    return [found, json.loads(orjson.dumps(meta))]
