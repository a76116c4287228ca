"""An answer from its tokens: stop strings in token order, counts, and how it ends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.gateway.stack import letters, new_answer
from trserve.gateway.answer import Answer, Delta, failure
from trserve.gateway.detokenizer import Detokenizer
from trserve.gateway.stop_strings import StopMatcher
from trserve.ipc.baton import Finish

END = 99  # a token without a letter of its own would show as chr(163)


def push(answer: Answer, text: str, finish: Finish = Finish.NONE, source: int = 0) -> Delta:
    return answer.push(letters(text), [source] * len(text), finish)


def test_text_and_counts_grow_together() -> None:
    answer = new_answer()
    assert push(answer, "AB", source=0) == Delta("AB", [1, 2], [0, 0], None, None)
    assert push(answer, "C", source=1).text == "C"
    assert (answer.num_tokens, answer.counts) == (3, [2, 1])


def test_a_stop_string_ends_with_the_token_that_completes_it() -> None:
    answer = new_answer(stops=("CD",))
    assert push(answer, "ABC", source=0).text == "AB"
    delta = answer.push(letters("DEF"), [1, 0, 0], Finish.NONE)
    assert delta == Delta("", letters("D"), [1], "stop", "CD")
    assert (answer.num_tokens, answer.counts) == (4, [3, 1])


def test_overshoot_is_never_seen_though_the_request_ended_otherwise() -> None:
    """The stop matches in a push whose last token is an EOS, or the limit."""
    for finish in (Finish.STOP, Finish.LENGTH, Finish.ABORT):
        answer = new_answer(stops=("B",))
        delta = push(answer, "ABCDEF", finish)
        assert (delta.text, delta.finish_reason, delta.stop_reason) == ("A", "stop", "B")
        assert (delta.token_ids, answer.num_tokens) == (letters("AB"), 2)


def test_the_end_token_counts_and_has_no_text() -> None:
    answer = new_answer()
    delta = answer.push([1, 2, END], [0, 0, 1], Finish.STOP)
    assert (delta.text, delta.token_ids) == ("AB", [1, 2, END])
    assert (delta.finish_reason, delta.stop_reason) == ("stop", None)
    assert (answer.num_tokens, answer.counts) == (3, [2, 1])


def test_the_end_token_that_was_asked_for_is_named() -> None:
    answer = new_answer(ids=(END,))
    assert answer.push([1, END], [0, 0], Finish.STOP).stop_reason == END


def test_an_end_token_completes_no_stop_string() -> None:
    answer = new_answer(stops=("AB",))
    delta = answer.push([1, 2], [0, 0], Finish.STOP)
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("A", "stop", None)


@pytest.mark.parametrize(
    ("finish", "reason"),
    [(Finish.STOP, "stop"), (Finish.LENGTH, "length"), (Finish.ABORT, "abort")],
)
def test_what_was_withheld_is_shown_at_the_end(finish: Finish, reason: str) -> None:
    answer = new_answer(stops=("BCD",))
    assert push(answer, "ABC").text == "A"
    delta = answer.push(
        [END] if finish is Finish.STOP else [], [0] * (finish is Finish.STOP), finish
    )
    assert (delta.text, delta.finish_reason) == ("BC", reason)


def test_an_end_without_new_tokens_is_an_end() -> None:
    answer = new_answer()
    push(answer, "AB")
    delta = answer.push([], [], Finish.STOP)
    assert (delta.text, delta.token_ids, delta.finish_reason) == ("", [], "stop")
    assert answer.num_tokens == 2


def test_a_stop_string_ends_nothing_within_the_least_tokens() -> None:
    answer = new_answer(stops=("B", "DE"), least=4)
    assert push(answer, "AB").text == "AB"
    assert push(answer, "CD").text == "C"  # "DE" may begin here
    delta = push(answer, "EF")
    assert (delta.text, delta.token_ids) == ("", letters("E"))
    assert (delta.finish_reason, delta.stop_reason) == ("stop", "DE")
    assert answer.num_tokens == 5


def test_the_end_token_has_a_text_where_it_is_to_be_shown() -> None:
    for ids, reason in (((3,), 3), ((), None)):
        answer = new_answer(ids=ids, shows_end=True)
        delta = answer.push([1, 2, 3], [0, 0, 1], Finish.STOP)
        assert (delta.text, delta.finish_reason, delta.stop_reason) == ("ABC", "stop", reason)
        assert (answer.num_tokens, answer.counts) == (3, [2, 1])


def test_an_end_token_that_is_shown_may_complete_a_stop_string() -> None:
    answer = new_answer(stops=("BC",), ids=(3,), shows_end=True)
    delta = answer.push([1, 2, 3], [0, 0, 1], Finish.STOP)
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("ABC", "stop", "BC")


class HeldBack:
    """A detokenizer that shows its last letter only at the end."""

    def __init__(self) -> None:
        self.held = ""

    def push(self, token: int) -> str:
        shown, self.held = self.held, chr(64 + token)
        return shown

    def flush(self) -> str:
        shown, self.held = self.held, ""
        return shown


def test_a_stop_string_may_end_in_what_the_detokenizer_held_back() -> None:
    held: Detokenizer = HeldBack()  # type: ignore[assignment]
    answer = Answer(held, StopMatcher(["B"]), (), 1)
    delta = push(answer, "AB", Finish.LENGTH)
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("A", "stop", "B")


TEXTS = st.text("ABC", max_size=30)


@given(TEXTS, st.lists(st.text("ABC", min_size=1, max_size=4), max_size=3), st.data())
def test_the_answer_does_not_depend_on_how_it_was_cut(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    whole, cut = (new_answer(stops=tuple(stops)) for _ in range(2))
    expected = push(whole, text, Finish.LENGTH)
    deltas, at = [], 0
    while cut.finish_reason is None:
        end = min(len(text), at + data.draw(st.integers(0, 5)))
        last = end == len(text)
        deltas.append(push(cut, text[at:end], Finish.LENGTH if last else Finish.NONE))
        at = end
    assert "".join(delta.text for delta in deltas) == expected.text
    assert [token for delta in deltas for token in delta.token_ids] == expected.token_ids
    assert deltas[-1][3:] == expected[3:]
    assert cut.num_tokens == whole.num_tokens == len(expected.token_ids)
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    assert cut.num_tokens == (min(ends) if ends else len(text))


@given(
    st.text("ABC", min_size=1, max_size=20),
    st.lists(st.text("ABC", min_size=1, max_size=4), max_size=3),
    st.sampled_from([Finish.STOP, Finish.LENGTH, Finish.ABORT]),
    st.integers(0, 8),
    st.booleans(),
    st.lists(st.integers(0, 20), max_size=6),
)
def test_ends_by_their_definition(
    text: str, stops: list[str], finish: Finish, least: int, shows_end: bool, cuts: list[int]
) -> None:
    """Every token has one letter; in one push, and in several."""
    seen = text[:-1] if finish is Finish.STOP and not shows_end else text
    ends = [
        (end, -len(stop), stop)
        for stop in stops
        for end in range(least + 1, len(seen) + 1)
        if seen[:end].endswith(stop)
    ]
    if ends:
        end, _, stop = min(ends)
        shown = seen[:end] if shows_end else seen[: end - len(stop)]
        expected = (shown, end, "stop", stop)
    else:
        reason = {Finish.STOP: "stop", Finish.LENGTH: "length", Finish.ABORT: "abort"}[finish]
        expected = (seen, len(text), reason, "timeout" if finish is Finish.ABORT else None)
    for pushes in ([len(text)], [*sorted(cut for cut in cuts if cut < len(text)), len(text)]):
        answer = new_answer(stops=tuple(stops), least=least, shows_end=shows_end)
        found, at = "", 0
        while answer.finish_reason is None:
            start, at = at, pushes.pop(0)
            delta = push(answer, text[start:at], finish if at == len(text) else Finish.NONE)
            found += delta.text
        assert (found, answer.num_tokens, answer.finish_reason, answer.stop_reason) == expected


@pytest.mark.parametrize(
    ("finish", "status"),
    [
        (Finish.ROUTER_ERROR, 500),
        (Finish.NUMERIC_ERROR, 500),
        (Finish.WORKER_LOST, 503),
        (Finish.WORKER_CRASHED, 500),
    ],
)
def test_failures_have_a_status_and_a_code(finish: Finish, status: int) -> None:
    error = failure(finish)
    assert error is not None
    assert (error.status, bool(error.code)) == (status, True)


def test_a_grammar_that_fails_is_the_requests_own_matter() -> None:
    error = failure(Finish.NUMERIC_ERROR, barred=True)
    assert error is not None
    assert (error.status, error.code) == (400, "grammar_failed")
    assert "schema, expression or grammar" in str(error)


@pytest.mark.parametrize("finish", [Finish.NONE, Finish.STOP, Finish.LENGTH, Finish.ABORT])
def test_what_is_no_failure(finish: Finish) -> None:
    assert failure(finish) is None


def test_every_finish_is_an_end_or_a_failure() -> None:
    for finish in Finish:
        if finish is Finish.NONE or failure(finish):
            continue
        assert new_answer().push([], [], finish).finish_reason is not None
