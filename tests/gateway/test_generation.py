"""A request in flight: what the slab gained reaches the sink once, in order, also after a pause."""

from __future__ import annotations

import pytest

from tests.gateway.stack import ListSink, letters, new_answer
from tests.workers.fakes import World, world
from trserve.errors import RequestError
from trserve.gateway.generation import Generation
from trserve.gateway.slots import Slot
from trserve.ipc import extras as extras_module
from trserve.ipc.baton import Baton, Finish, SlotState
from trserve.ipc.extras import Extras, write_extras

PROMPT = letters("abc".upper())


class Row:
    """A slot whose row a test writes, and the generation that reads it."""

    def __init__(self, w: World, sink: ListSink, stops: tuple[str, ...] = ()) -> None:
        self.w, self.sink = w, sink
        self.slot: Slot = w.submit(PROMPT, limit=60)
        self.length, self.hop, self.bank = len(PROMPT), 0, 0
        self.generation = Generation(
            slab=w.slab,
            slot=self.slot,
            prompt_tokens=len(PROMPT),
            seed=17,
            answer=new_answer(stops=stops),
            sink=sink,
            model_names=["small", "large"],
        )

    def write(self, text: str, finish: Finish = Finish.NONE, source: int = 0) -> int:
        """Commit ``text``; the word that says so."""
        slab, at, end = self.w.slab, self.length, self.length + len(text)
        slab.tokens[self.slot.index, at:end] = letters(text)
        slab.source[self.slot.index, at:end] = source
        self.length = end
        state = SlotState.LIVE if finish is Finish.NONE else SlotState.DONE
        word = Baton(end, source, state, finish, self.bank, self.hop).pack()
        slab.baton[self.slot.index] = word
        return word

    def advance(self, text: str, finish: Finish = Finish.NONE, source: int = 0) -> None:
        self.generation.advance(self.write(text, finish, source))


def test_each_token_is_given_once() -> None:
    with world() as w:
        row = Row(w, ListSink())
        word = row.write("XY")
        row.generation.advance(word)
        row.generation.advance(word)
        row.advance("Z", source=1)
        assert [delta.text for delta in row.sink.deltas] == ["XY", "Z"]
        assert row.sink.ids == letters("XYZ")


def test_a_word_without_tokens_gives_nothing() -> None:
    with world() as w:
        row = Row(w, ListSink())
        row.advance("")
        assert row.sink.deltas == []


def test_after_a_pause_everything_comes_at_once() -> None:
    with world() as w:
        row = Row(w, ListSink())
        row.sink.paused = True
        for text in ("A", "BC", "D"):
            row.advance(text)
        last = row.write("E", Finish.LENGTH)
        row.generation.advance(last)
        assert row.sink.deltas == [] and not row.generation.ended
        row.sink.paused = False
        row.generation.advance(last)
        assert (row.sink.text, row.sink.finish_reason) == ("ABCDE", "length")
        assert row.generation.ended


def test_nothing_follows_the_end() -> None:
    with world() as w:
        row = Row(w, ListSink(), stops=("B",))
        row.advance("ABC")
        row.advance("DEF", Finish.LENGTH)
        row.generation.fail(RequestError("late"))
        assert (row.sink.text, len(row.sink.deltas), row.sink.error) == ("A", 1, None)


@pytest.mark.parametrize("finish", [Finish.ROUTER_ERROR, Finish.NUMERIC_ERROR, Finish.WORKER_LOST])
def test_a_failure_is_told_once(finish: Finish) -> None:
    with world() as w:
        row = Row(w, ListSink())
        row.advance("A", finish)
        assert row.sink.error is not None and row.sink.error.code
        assert row.generation.ended
        row.sink.error = None
        row.advance("B", finish)
        assert row.sink.error is None


@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize("finish", [Finish.ROUTER_ERROR, Finish.NUMERIC_ERROR, Finish.WORKER_LOST])
def test_an_answer_that_was_complete_before_a_failure_is_an_answer(
    finish: Finish, paused: bool
) -> None:
    """Whoever has the baton goes on after a stop string until the gateway has seen it."""
    with world() as w:
        row = Row(w, ListSink(), stops=("B",))
        row.sink.paused = paused
        last = row.write("ABC", finish)
        row.generation.advance(last)
        row.sink.paused = False
        row.generation.advance(last)
        assert (row.sink.text, row.sink.finish_reason, row.sink.error) == ("A", "stop", None)


def test_what_was_committed_before_a_failure_comes_before_it() -> None:
    with world() as w:
        row = Row(w, ListSink())
        row.advance("AB", Finish.ROUTER_ERROR)
        assert row.sink.text == "AB" and row.sink.error is not None


@pytest.mark.parametrize("finish", [Finish.LENGTH, Finish.NONE])
def test_the_end_of_everything_takes_no_answer_that_is_there(finish: Finish) -> None:
    """Also of a client that reads too slowly to have been told."""
    lost = RequestError("lost", status=503)
    with world() as w:
        row = Row(w, ListSink())
        row.sink.paused = True
        word = row.write("ABC", finish)
        row.generation.advance(word)
        row.generation.conclude(word, lost)
        assert row.sink.text == "ABC" and row.generation.ended
        done = finish is Finish.LENGTH
        assert (row.sink.finish_reason, row.sink.error) == (
            ("length", None) if done else (None, lost)
        )
        row.generation.conclude(word, lost)
        assert len(row.sink.deltas) == 1


@pytest.mark.parametrize(("barred", "code"), [(False, "numeric_error"), (True, "grammar_failed")])
def test_the_extras_tell_whose_fault_it_was(barred: bool, code: str) -> None:
    with world() as w:
        row = Row(w, ListSink())
        row.hop, row.bank = 1, 1
        write_extras(w.slab.extras(row.slot.index, 1), 0, 0, barred, 1)
        row.advance("A", Finish.NUMERIC_ERROR)
        assert row.sink.error is not None and row.sink.error.code == code


def test_an_abandoned_one_gives_nothing() -> None:
    with world() as w:
        row = Row(w, ListSink())
        row.generation.abandon()
        row.advance("A", Finish.LENGTH)
        assert row.sink.deltas == [] and row.sink.error is None


def test_usage_adds_up() -> None:
    with world() as w:
        row = Row(w, ListSink())
        row.advance("AB")
        row.hop, row.bank = 3, 1
        write_extras(w.slab.extras(row.slot.index, 1), 0, 2_500_000, False, 5)
        row.advance("CDE", Finish.LENGTH, source=1)
        usage = row.sink.usage()
        assert usage["prompt_tokens"] == 3
        assert usage["completion_tokens"] == 5
        assert usage["total_tokens"] == 8
        ours = usage["trserve"]
        assert ours["tokens"] == {"small": 2, "large": 3}
        assert sum(ours["tokens"].values()) == usage["completion_tokens"]
        assert (ours["handoffs"], ours["share"], ours["seed"]) == (3, 0.6, 17)
        assert ours["pending_ms"] == pytest.approx(2.5)


def test_usage_of_nothing_divides_by_nothing() -> None:
    with world() as w:
        row = Row(w, ListSink())
        row.advance("", Finish.ABORT)
        assert row.sink.usage()["trserve"]["share"] == 0.0


def test_extras_are_those_of_a_bank_that_did_not_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop string ends the answer while the request goes on: its banks are still written."""
    with world() as w:
        row = Row(w, ListSink(), stops=("B",))
        bank = lambda n: w.slab.extras(row.slot.index, n)  # noqa: E731
        write_extras(bank(0), 0, 1_000_000, False, 3)
        write_extras(bank(1), 0, 7_000_000, False, 3)
        word = row.write("AB")
        reads = []

        def read(bank_read: memoryview) -> Extras:
            reads.append(1)
            found = extras_module.read_extras(bank_read)
            if len(reads) == 1:  # a hop, and an end that fills the first bank again
                row.hop, row.bank = 1, 1
                row.write("C")
            return found

        monkeypatch.setattr("trserve.gateway.generation.read_extras", read)
        row.generation.advance(word)
        assert row.sink.usage()["trserve"]["pending_ms"] == pytest.approx(7.0)
        assert len(reads) == 2
