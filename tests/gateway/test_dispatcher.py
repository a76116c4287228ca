"""Admission in order, a bounded queue, and turns that nobody loses; streams that do not meet."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.gateway.stack import ListSink, new_dispatcher, new_job
from tests.workers.fakes import EOS, World, hash_token, world
from trserve.errors import RequestError
from trserve.gateway.dispatcher import Dispatcher
from trserve.gateway.generation import Generation
from trserve.ipc.trace import AnswerEnd, EventKind, TraceReader


def endless(model: int, row: Any) -> int:
    token = hash_token(model, row)
    return token + 1 if token == EOS else token


def submit(d: Dispatcher, w: World, sink: Any = None, **fields: Any) -> asyncio.Task[Generation]:
    return asyncio.ensure_future(d.submit(new_job(w, sink or ListSink(), **fields)))


async def settle() -> None:
    """Let every task run as far as it can."""
    for _ in range(5):
        await asyncio.sleep(0)


def play(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 30))


def work(w: World, d: Dispatcher, turns: int = 1) -> None:
    for _ in range(turns):
        for worker in w.workers:
            worker.turn()
        d.on_bell()


def test_streams_get_their_own_tokens_and_slots_come_back() -> None:
    async def story() -> None:
        with world(slots=3, token=endless) as w:
            d = new_dispatcher(w)
            sinks = [ListSink() for _ in range(3)]
            for n, sink in enumerate(sinks):
                await d.submit(new_job(w, sink, prompt=(n, n), limit=8))
            assert (d.num_live, w.slots.num_free) == (3, 0)
            work(w, d, 8)
            for n, sink in enumerate(sinks):
                row = [n, n]
                while len(row) < 8:
                    row.append(endless(0, row))
                assert sink.ids == row[2:]
                assert sink.finish_reason == "length"
            assert (d.num_live, d.num_closing, w.slots.num_free) == (0, 0, 3)

    play(story())


def test_who_waits_longest_is_served_first_and_nobody_overtakes() -> None:
    async def story() -> None:
        with world(slots=1, token=endless) as w:
            d = new_dispatcher(w)
            first = submit(d, w, limit=4)
            await settle()
            order: list[int] = []
            waiting = [submit(d, w, limit=4) for _ in range(4)]
            for n, task in enumerate(waiting):
                task.add_done_callback(lambda _, n=n: order.append(n))
            await settle()
            assert (first.done(), d.num_waiting) == (True, 4)
            for _ in range(5):
                work(w, d, 1)
                late = submit(d, w, limit=4)  # a slot may be free now, but not for this one
                late.add_done_callback(lambda _: order.append(99))
                await settle()
            while d.num_live or d.num_waiting:
                work(w, d, 1)
                await settle()
            assert order[:4] == [0, 1, 2, 3]

    play(story())


def submit_all(d: Dispatcher, w: World, count: int, **fields: Any) -> asyncio.Task[Any]:
    jobs = [new_job(w, ListSink(), **fields) for _ in range(count)]
    return asyncio.ensure_future(d.submit_all(jobs))


def test_a_request_gets_all_of_its_slots_or_none_and_is_not_overtaken() -> None:
    async def story() -> None:
        with world(slots=3, token=endless) as w:
            d = new_dispatcher(w)
            short, long = submit(d, w, limit=4), submit(d, w, limit=30)
            await settle()
            many, one = submit_all(d, w, 3, limit=5), submit(d, w, limit=4)
            await settle()
            work(w, d, 3)
            await settle()
            assert short.done() and (d.num_live, w.slots.num_free) == (1, 2)
            assert not many.done() and not one.done(), "two slots are not three"
            d.cancel(long.result())
            work(w, d, 1)
            await settle()
            assert many.done() and d.num_live == 3 and not one.done()
            work(w, d, 4)
            await settle()
            assert one.done()

    play(story())


def test_who_finds_too_few_pages_is_refused_or_waits_as_for_slots() -> None:
    """A client of the endpoint can try again; a program that embeds the engine cannot."""

    async def story() -> None:
        with world(slots=4, token=endless) as w:
            del w.slots._free_pages[1:]
            d = new_dispatcher(w)
            await d.submit(new_job(w, ListSink(), limit=5, pages=1))
            with pytest.raises(RequestError) as refused:
                await d.submit(new_job(w, ListSink(), limit=5, pages=1))
            assert (refused.value.status, refused.value.code) == (429, "logprobs_full")
            work(w, d, 4)
            patient = new_dispatcher(w, waits_for_pages=True)
            first, second, plain = (submit(patient, w, limit=5, pages=n) for n in (1, 1, 0))
            await settle()
            assert first.done() and not second.done() and not plain.done(), "nobody overtakes"
            work(w, patient, 3)
            await settle()
            assert second.done() and plain.done()
            work(w, patient, 4)
            assert w.slots.num_free_pages == 1 and w.slots.num_free == 4

    play(story())


def test_who_leaves_with_pages_granted_gives_them_back() -> None:
    async def story() -> None:
        with world(slots=4, token=endless) as w:
            del w.slots._free_pages[1:]
            d = new_dispatcher(w, waits_for_pages=True)
            held = await d.submit(new_job(w, ListSink(), limit=60, pages=1))
            leaves, stays = submit(d, w, limit=5, pages=1), submit(d, w, limit=5, pages=1)
            await settle()
            d.cancel(held)
            work(w, d, 2)  # the turn is granted, and its task has not run yet
            leaves.cancel()
            await settle()
            assert stays.done() and not stays.cancelled()
            work(w, d, 5)
            assert w.slots.num_free_pages == 1

    play(story())


def test_who_waits_behind_one_that_needs_many_goes_on_when_it_leaves() -> None:
    async def story() -> None:
        with world(slots=2, token=endless) as w:
            d = new_dispatcher(w)
            await d.submit(new_job(w, ListSink(), limit=60))
            many, one = submit_all(d, w, 2), submit(d, w, limit=4)
            await settle()
            assert d.num_waiting == 2
            many.cancel()
            await settle()
            assert one.done() and many.cancelled()

    play(story())


def test_a_choice_that_is_refused_takes_the_others_back() -> None:
    async def story() -> None:
        with world(slots=2, token=endless) as w:
            d = new_dispatcher(w)
            jobs = [new_job(w, ListSink()), new_job(w, ListSink(), params=bytes(5000))]
            with pytest.raises(RequestError):
                await d.submit_all(jobs)
            work(w, d, 3)
            assert (d.num_live, d.num_closing, w.slots.num_free) == (0, 0, 2)

    play(story())


def test_the_queue_is_bounded() -> None:
    async def story() -> None:
        with world(slots=1, token=endless) as w:
            d = Dispatcher(w.slab, w.slots, w.memory.bells[-1], max_waiting=2)
            tasks = [submit(d, w) for _ in range(3)]
            await settle()
            with pytest.raises(RequestError) as refused:
                await d.submit(new_job(w, ListSink()))
            assert (refused.value.status, refused.value.retry_after) == (429, 1)
            assert d.num_waiting == 2
            for task in tasks:
                task.cancel()
            await settle()

    play(story())


@pytest.mark.parametrize("granted", [False, True])
def test_a_waiter_that_gives_up_passes_its_turn_on(granted: bool) -> None:
    async def story() -> None:
        with world(slots=1, token=endless) as w:
            d = new_dispatcher(w)
            await d.submit(new_job(w, ListSink(), limit=4))
            leaves, stays = submit(d, w, limit=4), submit(d, w, limit=4)
            await settle()
            if granted:  # its turn has come, and it has not run yet
                work(w, d, 3)
                assert w.slots.num_free == 1
            leaves.cancel()
            await settle()
            assert leaves.cancelled()
            work(w, d, 3)
            await settle()
            assert stays.done()
            work(w, d, 3)
            assert w.slots.num_free == 1

    play(story())


def test_a_request_that_is_refused_at_its_turn_passes_it_on() -> None:
    async def story() -> None:
        with world(slots=1, token=endless) as w:
            d = new_dispatcher(w)
            await d.submit(new_job(w, ListSink(), limit=4))
            refused, fine = submit(d, w, params=bytes(5000)), submit(d, w, limit=4)
            await settle()
            work(w, d, 3)
            await settle()
            assert isinstance(refused.exception(), RequestError)
            assert fine.done()

    play(story())


def test_a_bug_in_one_stream_is_that_streams() -> None:
    async def story() -> None:
        with world(slots=3, token=endless) as w:
            d = new_dispatcher(w)
            sinks = [ListSink() for _ in range(3)]
            sinks[0].breaks = True
            for sink in sinks:
                await d.submit(new_job(w, sink, limit=6))
            work(w, d, 1)
            assert sinks[0].error is not None and sinks[0].error.status == 500
            assert [len(sink.ids) for sink in sinks[1:]] == [1, 1]
            work(w, d, 4)
            assert w.slots.num_free == 3

    play(story())


def test_a_cancelled_generation_frees_its_slot_everywhere() -> None:
    async def story() -> None:
        with world(slots=1, token=endless) as w:
            d = new_dispatcher(w)
            sink = ListSink()
            generation = await d.submit(new_job(w, sink, limit=60))
            work(w, d, 2)
            d.cancel(generation)
            assert (d.num_live, d.num_closing) == (0, 1)
            d.cancel(generation)  # twice is once
            work(w, d, 1)
            assert (d.num_closing, w.slots.num_free) == (0, 1)
            assert len(sink.ids) == 2 and sink.finish_reason is None
            w.check_nothing_held()

    play(story())


def test_a_stop_string_ends_the_request_at_its_worker_too() -> None:
    async def story() -> None:
        with world(slots=1, token=lambda model, row: 20 + len(row)) as w:
            d = new_dispatcher(w)
            sink = ListSink()
            await d.submit(new_job(w, sink, limit=60, stops=(chr(64 + 25),)))
            work(w, d, 5)
            assert (sink.ids, sink.finish_reason) == ([23, 24, 25], "stop")
            assert w.slots.num_free == 1
            w.check_nothing_held()

    play(story())


def test_a_paused_stream_is_caught_up_with() -> None:
    async def story() -> None:
        with world(slots=1, token=endless) as w:
            d = new_dispatcher(w)
            sink = ListSink()
            sink.paused = True
            generation = await d.submit(new_job(w, sink, limit=8))
            work(w, d, 7)
            assert (sink.ids, d.num_live) == ([], 1)
            sink.paused = False
            d.resume(generation)
            assert (len(sink.ids), sink.finish_reason) == (5, "length")
            assert (d.num_live, w.slots.num_free) == (0, 1)
            d.resume(generation)

    play(story())


@pytest.mark.parametrize("vanishes", [False, True])
def test_fail_all_ends_everybody_and_leaves_no_turn_behind(vanishes: bool) -> None:
    async def story() -> None:
        with world(slots=1, token=endless) as w:
            d = new_dispatcher(w)
            sink = ListSink()
            await d.submit(new_job(w, sink, limit=60))
            waiting = [submit(d, w) for _ in range(3)]
            await settle()
            d.fail_all(RequestError("lost", status=503))
            if vanishes:  # between the end of its wait and its next step
                waiting[0].cancel()
            await settle()
            assert sink.error is not None and sink.error.status == 503
            assert all(task.done() for task in waiting)
            assert isinstance(waiting[1].exception(), RequestError)
            assert (d.num_live, d.num_waiting) == (0, 0)
            # Its prompt was being encoded meanwhile, say.
            late = submit(d, w, limit=4)
            await settle()
            assert late.exception() is waiting[1].exception()
            work(w, d, 2)
            assert d.num_closing == 0

    play(story())


def test_idle_is_told_once_nobody_is_left() -> None:
    async def story() -> None:
        with world(slots=1, token=endless) as w:
            d = new_dispatcher(w)
            told: list[int] = []
            one, other = submit(d, w, limit=4), submit(d, w, limit=4)
            await settle()
            d.on_idle = lambda: told.append(d.num_live)
            d.check_idle()
            while not told:
                work(w, d, 1)
                await settle()
            assert one.done() and other.done()
            assert told == [0]

    play(story())


@given(st.integers(0, 2**32))
def test_no_slot_and_no_turn_is_ever_lost(seed: int) -> None:
    """Arrivals, disconnects, pauses and refusals in any order; at the end all slots are free."""

    async def story() -> None:
        dice = random.Random(seed)
        with world(slots=2, token=endless) as w:
            d = new_dispatcher(w)
            tasks: list[asyncio.Task[Any]] = []
            refused: set[asyncio.Task[Any]] = set()
            for _ in range(30):
                event = dice.randrange(8)
                if event == 0:
                    tasks.append(submit(d, w, limit=6))
                elif event == 1:
                    tasks.append(submit_all(d, w, dice.choice([1, 2]), limit=6))
                elif event == 2:
                    tasks.append(submit(d, w, params=bytes(5000)))
                    refused.add(tasks[-1])
                elif event == 3 and tasks:
                    task = dice.choice(tasks)
                    if not task.done():
                        task.cancel()
                    elif not task.cancelled() and task.exception() is None:
                        found = task.result()
                        for generation in found if isinstance(found, list) else [found]:
                            d.cancel(generation)
                elif event == 4:
                    await settle()
                else:
                    work(w, d, 1)
                    if dice.random() < 0.5:
                        await settle()
            await settle()
            for _ in range(200):
                work(w, d, 1)
                await settle()
            assert all(task.done() for task in tasks)
            assert (d.num_live, d.num_waiting, d.num_closing) == (0, 0, 0)
            assert w.slots.num_free == 2
            await asyncio.wait_for(d.submit(new_job(w, ListSink())), 1)
            for task in tasks:  # looked at, so that asyncio does not complain
                assert task.cancelled() or not task.exception() or task in refused

    play(story())


def test_the_life_of_a_request_is_noted_and_none_of_its_tokens() -> None:
    async def story() -> None:
        with world(slots=3, token=endless) as w:
            d = new_dispatcher(w)
            events = TraceReader(w.slab.trace_words(w.slab.layout.gateway))
            served = await d.submit(new_job(w, ListSink(), limit=9))
            work(w, d, 9)
            left = await d.submit(new_job(w, ListSink()))
            d.cancel(left)
            failed = await d.submit(new_job(w, ListSink()))
            work(w, d, 1)
            d.fail_all(RequestError("no more"))
            found = [(e.kind, e.value, e.slot, e.gen) for e in events.read()]
            expected = []
            for generation, begins, end in (
                (served, True, AnswerEnd.LENGTH),
                (left, False, AnswerEnd.CLIENT_LEFT),
                (failed, True, AnswerEnd.ERROR),
            ):
                slot = generation.slot.index, generation.slot.gen
                expected.append((EventKind.PUBLISHED, 3, *slot))
                if begins:
                    expected.append((EventKind.FIRST_TOKEN, 0, *slot))
                expected.append((EventKind.ANSWERED, end, *slot))
            assert found == expected

    play(story())


@pytest.mark.parametrize("ends", [False, True])
def test_a_bug_at_the_end_of_an_answer_is_told_too(ends: bool) -> None:
    async def story() -> None:
        with world(slots=1, token=endless) as w:
            d = new_dispatcher(w)
            sink = ListSink()
            sink.breaks = True
            generation = await d.submit(new_job(w, sink, limit=4 if ends else 6))
            work(w, d, 1)
            assert sink.error is not None and sink.error.status == 500
            assert generation.finish_reason is None
            work(w, d, 4)
            assert w.slots.num_free == 1

    play(story())
