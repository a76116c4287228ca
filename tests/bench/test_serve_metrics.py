"""Latencies, throughput and goodput of made-up answers, by the definitions in the help."""

import json

import pytest

from bench.serve_metrics import metric_names, row_of, sample_of
from bench.serve_stream import Answer
from bench.serve_watch import warnings


def answer(text_s, ended_s, tokens=None, written=(), sent_s=10.0, error=None, **usage):
    counted = None if tokens is None else {"completion_tokens": tokens, "prompt_tokens": 7, **usage}
    return Answer(9.9, sent_s, 5, list(text_s), list(written), ended_s, counted, None, error, True)


def test_the_latencies_of_one_answer():
    found = sample_of(answer([10.1, 10.2, 10.5], 10.6, 6))
    assert found.ttft == pytest.approx(100) and found.e2e == pytest.approx(600)
    assert found.tpot == pytest.approx((600 - 100) / 5)
    assert found.itl == pytest.approx([100, 300])
    # Two tokens an event, in the mean: each has half of its event's gap.
    assert found.itl_token == pytest.approx([50, 150])


def test_tokens_have_their_share_of_the_gap_where_every_event_is_counted():
    found = sample_of(answer([10.1, 10.2, 10.5], 10.5, 6, written=[1, 2, 6]))
    assert found.itl_token == pytest.approx([100, 75, 75, 75, 75])


def test_without_the_servers_count_events_are_tokens():
    row = row_of([answer([10.1, 10.2, 10.5], 10.5)])
    assert row["tokens"] == 3 and row["token_counts"] == "events" and row["input_tokens"] == 5
    assert row["mean_tpot_ms"] == pytest.approx(200) == row["mean_itl_ms"]


def test_an_answer_of_one_token_has_no_tpot_and_one_without_text_has_a_ttft():
    row = row_of([answer([10.1], 10.1, 1), answer([], 10.3, 1)])
    assert row["p50_tpot_ms"] is None and row["p99_itl_ms"] is None
    assert row["mean_ttft_ms"] == pytest.approx(200)


def test_throughput_counts_from_the_first_request_to_the_last_answer():
    row = row_of([answer([10.1, 10.5], 10.5, 10), answer([11.0, 14.0], 14.0, 30, sent_s=10.5)])
    assert row["seconds"] == pytest.approx(4) and row["tokens_per_s"] == pytest.approx(10)
    assert row["total_tokens_per_s"] == pytest.approx(54 / 4)
    assert row["requests_per_s"] == pytest.approx(0.5)
    assert row["per_user_tokens_per_s"] == pytest.approx(40 / 4)  # 0.5 s and 3.5 s
    assert row["peak_concurrency"] == 1 and row["mean_concurrency"] == pytest.approx(1)
    assert row["latency_s"] == pytest.approx(2) and row["p99_late_ms"] == pytest.approx(595)
    assert row["p50_ttft_ms"] == row["ttft_ms"] == pytest.approx(300)
    assert row["p90_ttft_ms"] == pytest.approx(460)


def test_rates_are_of_what_was_due_and_of_what_was_sent():
    def sent(due_s, sent_s):
        return Answer(due_s, sent_s, None, [sent_s + 1], [], sent_s + 1, done=True)

    row = row_of([sent(10.0, 10.0), sent(10.5, 11.0), sent(11.0, 12.0)])
    assert row["scheduled_per_s"] == pytest.approx(2) and row["sent_per_s"] == pytest.approx(1)
    assert row["p50_late_ms"] == pytest.approx(500) and row["p99_late_ms"] == pytest.approx(990)
    assert row_of([sent(10.0, 10.0)])["sent_per_s"] is None


def test_the_most_at_once():
    spans = ((10.0, 12.0), (10.5, 11.0), (11.0, 13.0))
    row = row_of([answer([end], end, 1, sent_s=begin) for begin, end in spans])
    assert row["peak_concurrency"] == 2 and row["mean_concurrency"] == pytest.approx(1.5)


def test_failed_answers_are_counted_and_are_in_no_latency():
    bad = [answer([10.1], 99.0, 5, error=f"http status 429: {'x' * 500}") for _ in range(3)]
    row = row_of([answer([10.1, 10.2], 10.2, 2), *bad])
    assert (row["completed"], row["failed"], row["failed_share"]) == (1, 3, 0.75)
    assert list(row["errors"].values()) == [3] and row["tokens"] == 2
    assert row["p99_e2e_ms"] == pytest.approx(200) and row["seconds"] == pytest.approx(0.2)


def test_goodput_is_of_answers_that_keep_to_every_limit():
    fast, slow = answer([10.1, 10.2], 10.2, 2), answer([10.1, 11.0], 11.0, 2)
    late = answer([10.9, 11.0], 11.0, 2)
    row = row_of([fast, slow, late], {"ttft": 200, "tpot": 150})
    assert row["goodput_per_s"] == pytest.approx(1) and row["goodput_share"] == pytest.approx(1 / 3)
    assert row_of([fast])["goodput_per_s"] is None


def test_who_wrote_is_read_from_trserves_usage():
    own = {"tokens": {"a": 3, "b": 1}, "handoffs": 2}
    answers = [answer([10.1], 10.2, 4, trserve=own) for _ in range(2)]
    answers[1].router = "r2r"
    row = row_of(answers)
    assert row["llm_share"] == 0.25 and row["handoffs"] == 4 and row["handoffs_per_request"] == 2
    assert row["models"] == {"a": 6, "b": 2} and row["algorithm"] == "r2r"
    assert row_of([answer([10.1], 10.2, 4)])["llm_share"] is None


def test_a_steady_rate_has_a_small_error():
    steady = [answer([10 + 0.01 * i for i in range(800)], 18.0, 800)]
    assert row_of(steady)["relative_error"] < 0.02


def test_names_are_those_of_the_numbers_in_a_row():
    row = row_of([answer([10.1, 10.2], 10.2, 2)], {"ttft": 1})
    texts = {"errors", "token_counts", "models", "algorithm"}
    assert set(metric_names()) == set(row) - texts
    assert all(row[name] is None or isinstance(row[name], int | float) for name in metric_names())
    json.dumps(row, allow_nan=False)
    json.dumps(row_of([]), allow_nan=False)


def warned(**changed):
    row = {"client_cpu_share": 0.1, "client_lag_p50_ms": 0.1, "client_lag_p99_ms": 1.0}
    row |= {"p50_ttft_ms": 50.0, "p99_ttft_ms": 90.0, "p50_itl_ms": 5.0, "p99_itl_ms": 9.0}
    row |= {"p99_late_ms": 0.5, "scheduled_per_s": 10.0, "sent_per_s": 9.9}
    return " ".join(warnings(row | changed, capped=changed.pop("capped", False)))


def test_a_client_that_explains_the_numbers_is_warned_of():
    assert warned() == ""
    assert "bottleneck: it takes 90% of a core" in warned(client_cpu_share=0.9)
    assert "33% of p99_itl_ms" in warned(client_lag_p99_ms=3.0)
    assert "p99_ttft_ms" in warned(client_lag_p99_ms=30.0)
    assert warned(client_lag_p99_ms=1.9, p99_itl_ms=1.0) == ""  # the timer's own
    assert warned(client_lag_p99_ms=30.0, p99_itl_ms=None, p99_ttft_ms=None) == ""


def test_arrivals_that_fall_behind_are_warned_of():
    assert "the client is too slow" in warned(p99_late_ms=40.0)
    assert "they wait for --concurrency" in warned(p99_late_ms=40.0, capped=True)
    assert "9 requests/s were sent, 10 were due" in warned(sent_per_s=9.0)
    assert warned(scheduled_per_s=None, sent_per_s=None) == ""
