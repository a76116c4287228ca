"""What is over is said until it is known to have been heard, on however many connections."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from trserve.edge import ends as module
from trserve.edge.ends import Ends


def sent(ends: Ends, room: int = 100) -> list[int]:
    found: list[int] = []

    def send(number: int) -> bool:
        if len(found) < room:
            found.append(number)
            return True
        return False

    ends.send(send)
    return found


def one_asked_about() -> Ends:
    """1 was sent, and then a ping of 10."""
    ends = Ends()
    ends.add(1)
    assert sent(ends) == [1]
    ends.pinged(10)
    return ends


def test_what_there_is_no_room_for_waits() -> None:
    ends = Ends()
    for number in (1, 2, 3):
        ends.add(number)
    assert sent(ends, room=2) == [1, 2]
    assert ends and sent(ends) == [3]
    assert not ends and sent(ends) == []


def test_what_was_sent_after_the_ping_is_not_known_to_have_come() -> None:
    ends = one_asked_about()
    ends.add(2)
    sent(ends)
    ends.pinged(20)
    ends.ponged(10)
    ends.reconnected()
    assert sent(ends) == [2]


def test_an_old_answer_says_nothing() -> None:
    ends = one_asked_about()
    ends.ponged(9)
    ends.reconnected()
    ends.ponged(10)  # of the connection before
    assert sent(ends) == [1]


def test_they_are_so_many_at_most() -> None:
    ends = Ends()
    for number in range(2 * module.MOST):
        ends.add(number)
        if number % 7 == 0:
            sent(ends)
    ends.reconnected()
    assert sent(ends, room=10**9) == list(range(module.MOST))


@given(st.integers(0, 2**32))
def test_all_are_heard_on_a_connection_that_breaks_at_any_time(seed: int) -> None:
    """Frames keep their order, and a break loses some of the last ones."""
    rng, ends = Random(seed), Ends()
    over, heard = set[int](), set[int]()
    way: list[tuple[str, int]] = []
    back: list[int] = []

    def send(number: int) -> bool:
        if len(way) >= 5:
            return False
        way.append(("end", number))
        return True

    for turn in range(1, 400):
        if turn < 200 and rng.random() < 0.5:
            over.add(turn)
            ends.add(turn)
        ends.send(send)
        if rng.random() < 0.2 and len(way) < 5:
            way.append(("ping", turn))
            ends.pinged(turn)
        for _ in range(min(len(way), rng.randrange(4))):
            kind, number = way.pop(0)
            if kind == "end":
                heard.add(number)
            else:
                back.append(number)
        if back and rng.random() < 0.5:
            ends.ponged(back.pop(0))
        if turn < 300 and rng.random() < 0.05:
            way.clear()
            back.clear()
            ends.reconnected()
    assert not ends and heard == over
