"""Which group gets a request: properties of the choice, whatever was sent before."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from trserve.cluster.affinity import CHUNK_BYTES, EXCESS, SLACK, Affinity

LOADS = st.lists(st.one_of(st.none(), st.integers(0, 100)), min_size=1, max_size=6).filter(
    lambda loads: any(load is not None for load in loads)
)
PROMPT = bytes(range(256)) * 8


def prompt(name: int, chunks: int = 4) -> bytes:
    return name.to_bytes(4, "little") * (chunks * CHUNK_BYTES // 4)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(LOADS, st.sampled_from(["", "a", "b"]), st.integers(0, 3)), max_size=20))
def test_a_group_that_is_away_or_far_too_busy_is_never_chosen(
    asks: list[tuple[list[int | None], str, int]],
) -> None:
    affinity = Affinity()
    for loads, session, name in asks:
        group, reason = affinity.choose(loads, session, prompt(name))
        there = [load for load in loads if load is not None]
        load = loads[group]
        assert load is not None
        assert load <= min(there) + SLACK or load <= EXCESS * sum(there) / len(there)
        if reason == "load":
            assert load == min(there)


def test_a_session_stays_and_a_prefix_is_found() -> None:
    affinity = Affinity()
    assert affinity.choose([5, 0, 0], "one", prompt(1)) == (1, "load")
    assert affinity.choose([0, 5, 0], "one", prompt(2)) == (1, "session")
    assert affinity.choose([0, 5, 0], "two", prompt(2) + b"more") == (1, "prefix")
    assert affinity.choose([0, 5, 0], "", prompt(3)) == (0, "load")


def test_the_longest_known_prefix_decides() -> None:
    affinity = Affinity()
    affinity.choose([0, 9], "", prompt(1, 2))
    affinity.choose([9, None], "", prompt(1, 2) + prompt(2, 2))  # all of it is known in group 0 now
    other = Affinity()
    other.choose([9, 0], "", prompt(1, 2))
    other.choose([0, None], "", prompt(1, 2) + prompt(2, 2))
    assert other.choose([0, 0], "", prompt(1, 2) + prompt(2, 2) + prompt(3)) == (0, "prefix")


def test_what_is_shorter_than_a_chunk_is_no_prefix() -> None:
    affinity = Affinity()
    affinity.choose([1, 0], "", b"x" * (CHUNK_BYTES - 1))
    assert affinity.choose([0, 1], "", b"x" * (CHUNK_BYTES - 1)) == (0, "load")


def test_a_group_that_went_away_is_forgotten() -> None:
    affinity = Affinity()
    affinity.choose([1, 0], "one", prompt(1))
    affinity.forget(1)
    assert affinity.choose([0, 1], "one", prompt(1)) == (0, "load")


def test_what_is_kept_is_bounded() -> None:
    affinity = Affinity(most_kept=10)
    for name in range(100):
        affinity.choose([0, 0], str(name), prompt(name))
    assert len(affinity._sessions) == len(affinity._prefixes) == 10


def test_a_long_name_of_a_session_is_not_kept() -> None:
    affinity = Affinity(most_kept=4)
    name = "me" * 10**6
    first = affinity.choose((0, 0), name, b"").group
    assert affinity.choose((5, 5), name, b"") == (first, "session")
    assert all(isinstance(key, int) for key in affinity._sessions)
