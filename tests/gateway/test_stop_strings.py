"""Stop strings against an oracle that looks at one character at a time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.machine_speed import slowness
from trserve.gateway.stop_strings import StopMatcher

# Few letters, so that stops overlap with the text, with each other and with themselves.
LETTERS = "ab한"
STOPS = st.lists(st.text(LETTERS, min_size=1, max_size=5), max_size=4)
PIECES = st.lists(st.text(LETTERS, max_size=6), max_size=12)
MAY_END = st.lists(st.booleans(), min_size=12, max_size=12)


def oracle(text, stops, may_end=None):
    """(text before the stop, stop), by the definition; the stop is None if there is none.

    ``may_end``: whether a stop may end at each character.
    """
    for end in range(1, len(text) + 1):
        if may_end is not None and not may_end[end - 1]:
            continue
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


def run(stops, pieces, **options):
    """What was shown after each push, the stop, and what flush added."""
    matcher = StopMatcher(stops, **options)
    shown, matched = [""], None
    for piece in pieces:
        text, stop = matcher.push(piece)
        shown.append(shown[-1] + text)
        matched = matched or stop
    return shown, matched, matcher.flush()


@given(STOPS, PIECES, st.booleans())
def test_equals_the_oracle_for_any_chunking(stops, pieces, include):
    shown, matched, rest = run(stops, pieces, include_in_output=include)
    text, stop = oracle("".join(pieces), stops)
    assert matched == stop
    assert shown[-1] + rest == text + (stop if include and stop else "")


@given(STOPS, PIECES, MAY_END, st.booleans())
def test_a_stop_is_none_where_none_may_end(stops, pieces, may_end, include):
    """And one that begins there and ends later is."""
    matcher = StopMatcher(stops, include_in_output=include)
    shown, matched = "", None
    for piece, may in zip(pieces, may_end, strict=False):
        text, stop = matcher.push(piece, may_end=may)
        shown, matched = shown + text, matched or stop
    allowed = [may for piece, may in zip(pieces, may_end, strict=False) for _ in piece]
    text, stop = oracle("".join(pieces), stops, allowed)
    assert matched == stop
    assert shown + matcher.flush() == text + (stop if include and stop else "")


@given(STOPS, PIECES)
def test_withholds_exactly_the_longest_prefix_of_a_stop(stops, pieces):
    shown, _, _ = run(stops, pieces)
    for n, visible in enumerate(shown):
        text, stop = oracle("".join(pieces[:n]), stops)
        prefixes = {s[:k] for s in stops for k in range(1, len(s))}
        held = max(
            (k for k in range(len(text) + 1) if text[len(text) - k :] in prefixes), default=0
        )
        assert visible == (text if stop else text[: len(text) - held])


@given(STOPS, PIECES)
def test_match_is_reported_by_the_push_that_completes_it(stops, pieces):
    matcher = StopMatcher(stops)
    for n, piece in enumerate(pieces, 1):
        _, matched = matcher.push(piece)
        assert (matched is not None) == (oracle("".join(pieces[:n]), stops)[1] is not None)
        if matched:
            return


@pytest.mark.parametrize("include", [False, True])
def test_nothing_after_a_match(include):
    matcher = StopMatcher(["b"], include_in_output=include)
    assert matcher.push("abc") == ("ab" if include else "a", "b")
    assert matcher.push("more b") == ("", None)
    assert matcher.flush() == ""


def test_stop_at_the_very_beginning_leaves_an_empty_text():
    assert StopMatcher(["\n"]).push("\nabc") == ("", "\n")


def test_no_stop_withholds_nothing():
    matcher = StopMatcher([])
    assert [matcher.push(piece) for piece in ("a", "", "b")] == [
        ("a", None),
        ("", None),
        ("b", None),
    ]
    assert matcher.flush() == ""


def test_the_reported_case():
    """A stop whose beginning looks like the end of the text: nothing of it may be streamed."""
    matcher = StopMatcher(["DEFGHIJ", "Observation"])
    pieces = ["ABC", "DEF", "GHI", "X", "Obs", "erv", "ation", ":"]
    out = [matcher.push(piece) for piece in pieces]
    assert [text for text, _ in out] == ["ABC", "", "", "DEFGHIX", "", "", "", ""]
    assert [stop for _, stop in out] == [None] * 6 + ["Observation", None]


def test_first_of_several_is_the_one_that_ends_first():
    assert StopMatcher(["abcd", "bc"]).push("abcd") == ("a", "bc")
    assert StopMatcher(["bc", "abc"]).push("abcd") == ("", "abc")


def test_long_adversarial_stops_stay_cheap():
    """A thousand held characters and 63 stops that share only the first: no quadratic search."""
    import time

    stops = ["a" * 1024] + ["a" + chr(0x4E00 + k) * 1023 for k in range(63)]
    matcher = StopMatcher(stops)
    begin = time.perf_counter()
    for _ in range(1023):
        assert matcher.push("a") == ("", None)
    assert time.perf_counter() - begin < 1.0 * slowness()
    assert matcher.push("b") == ("a" * 1023 + "b", None)


def test_empty_stop_is_an_error_of_ours():
    with pytest.raises(AssertionError):
        StopMatcher(["a", ""])
