"""The closed loop against users and probes that are made up: windows, errors, batch means."""

import asyncio
import math
import time

import pytest

from bench.closed_loop import Counts, Record, Until, measure, relative_error, window_of


def steady(rate, seconds, every=0.5, models=2):
    """Readings of a server that writes ``rate`` tokens/s, all at the first model."""
    steps = range(round(seconds / every) + 1)
    return [Counts(i * every, (round(i * every * rate),) + (0,) * (models - 1)) for i in steps]


def test_a_steady_server_has_no_error():
    assert relative_error(steady(100, 10)) == 0


def test_batches_are_joined_until_there_are_at_most_twenty():
    # Alternating rates cancel out in joined batches, and would not in single ones.
    readings = [Counts(float(i), (100 * i + (50 if i % 2 else 0),)) for i in range(41)]
    assert relative_error(readings) == 0


def test_the_error_is_that_of_the_mean_of_batches():
    rates = [90, 110, 100, 95, 105]
    totals = [0]
    for rate in rates:
        totals.append(totals[-1] + rate)
    readings = [Counts(float(i), (total,)) for i, total in enumerate(totals)]
    deviation = math.sqrt(sum((rate - 100) ** 2 for rate in rates) / 4)
    assert relative_error(readings) == pytest.approx(deviation / math.sqrt(5) / 100)


@pytest.mark.parametrize("readings", [steady(100, 1.5), steady(0, 10)])
def test_too_little_says_nothing(readings):
    assert relative_error(readings) == math.inf


def test_a_window_counts_what_came_within_it():
    record = Record()
    record.first_token(0.0, 0.5)  # before
    record.first_token(11.0, 11.2)
    record.ended(8.0, 12.0)
    record.ended(8.0, 21.0)  # after
    readings = [
        Counts(10.0, (5, 1), 2, {"a": 1.0}),
        Counts(20.0, (105, 51), 42, {"a": 4.0, "b": 2.0}),
    ]
    window = window_of(readings, record, 3)
    assert window.tokens == (100, 50) and window.handoffs == 40
    assert window.tokens_per_s == 15 and window.per_user_tokens_per_s == 5
    assert window.share == pytest.approx(1 / 3)
    assert window.ttft_ms == pytest.approx(200) and window.latency_s == pytest.approx(4)
    assert window.extra == {"a": 3.0, "b": 2.0}


def test_without_answers_in_the_window_first_tokens_are_those_of_the_beginning():
    record = Record()
    record.first_token(0.0, 0.5)
    window = window_of([Counts(10.0, (0,)), Counts(20.0, (1,))], record, 1)
    assert window.ttft_ms == pytest.approx(500) and window.latency_s is None


@pytest.mark.parametrize(
    ("elapsed", "tokens", "error", "reached"),
    [
        (4.0, 9999, 0.0, False),
        (6.0, 999, 0.0, False),
        (6.0, 1000, 0.02, False),
        (6.0, 1000, 0.01, True),
        (60.0, 0, math.inf, True),
    ],
)
def test_when_a_window_may_end(elapsed, tokens, error, reached):
    until = Until(tokens=1000, relative_error=0.01, least_s=5.0, most_s=60.0)
    assert until.reached(elapsed, tokens, error) is reached


class Writer:
    """A user who gets a token every few milliseconds, and what all of them got so far."""

    total = 0
    left = 0

    async def run(self, record):
        began = time.perf_counter()
        try:
            while True:
                await asyncio.sleep(0.005)
                if not record.first_tokens or self.total == 0:
                    record.first_token(began, time.perf_counter())
                Writer.total += 1
        finally:
            Writer.left += 1

    async def read(self):
        return Counts(time.perf_counter(), (Writer.total,))


def test_users_are_stopped_when_the_window_is_over():
    Writer.total = Writer.left = 0
    until = Until(least_s=0.3, most_s=0.6, warm_up_s=0.05, batch_s=0.05)

    async def run():
        return await measure(lambda number: Writer(), Writer(), 1, until)

    window = asyncio.run(run())
    assert Writer.left == 1
    assert 0.3 <= window.seconds < 0.6
    assert 0 < window.tokens[0] <= 125


def test_an_error_of_a_user_ends_the_measurement():
    class Broken(Writer):
        async def run(self, record):
            record.first_token(0.0, 0.0)
            raise RuntimeError("no answer")

    async def run():
        await measure(lambda number: Broken(), Writer(), 1, Until(least_s=5.0))

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(run())
    assert caught.group_contains(RuntimeError, match="no answer")
