"""/metrics as a scraper sees it: sums that agree with the responses, and only grow."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Mapping

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from tests.serverproc import Server, concurrently, wait_until

COMPLETIONS = "/v1/completions"
GREEDY = {"temperature": 0, "trserve": {"router": {"tau": 0.05}}}
Sample = tuple[str, tuple[tuple[str, str], ...]]
GATEWAY_BYTES = 150e6


def scrape(server: Server) -> dict[Sample, float]:
    response = server.request("GET", "/metrics", timeout_s=5.0)
    assert response.status == 200
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    found = {}
    for family in text_string_to_metric_families(response.body.decode()):
        assert family.documentation and family.type != "unknown"
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, "a series stands there twice"
            found[key] = sample.value
    return found


def value(samples: Mapping[Sample, float], metric: str, **labels: str) -> float:
    return samples.get((f"trserve_{metric}", tuple(sorted(labels.items()))), 0.0)


def counters(samples: Mapping[Sample, float]) -> dict[Sample, float]:
    endings = ("_total", "_bucket", "_count", "_sum")
    return {key: number for key, number in samples.items() if key[0].endswith(endings)}


def settled(server: Server) -> dict[Sample, float]:
    """Once no request is in the server any more, and its workers, fallen idle, have said so.

    They do that ten milliseconds later, or in their next step.
    """

    def idle(found: Mapping[Sample, float]) -> bool:
        used = [value(found, "kv_blocks", model=name, state="used") for name in server.models]
        return value(found, "slots", state="free") == value_of_all_slots(found) and not any(used)

    return wait_until(lambda: scrape(server), idle, 10.0)


def value_of_all_slots(samples: Mapping[Sample, float]) -> float:
    return sum(value(samples, "slots", state=state) for state in ("free", "live", "closing"))


def ask(server: Server, fields: dict) -> dict:
    """The usage of one request, streamed or not."""
    if fields.get("stream"):
        events = server.stream(COMPLETIONS, fields | {"stream_options": {"include_usage": True}})
        return list(events)[-1]["usage"]
    return server.post(COMPLETIONS, fields)["usage"]


def test_sums_equal_what_the_responses_said(server):
    before = settled(server)
    requests = [
        {**GREEDY, "prompt": [5 + index, 6, 7], "max_tokens": 12 + index, "ignore_eos": True}
        | {"stream": index % 2 == 0, "n": 1 + index % 3, "seed": index}
        for index in range(12)
    ]
    requests.append({**GREEDY, "prompt": [[5, 6], [7, 8, 9]], "max_tokens": 5})
    usages = concurrently(lambda fields: ask(server, fields), requests, 6)
    after = settled(server)

    def grown(metric: str, **labels: str) -> float:
        return value(after, metric, **labels) - value(before, metric, **labels)

    written = Counter[str]()
    for usage in usages:
        written.update(usage["trserve"]["tokens"])
    answers = sum(fields.get("n", 1) for fields in requests) + 1
    for name in server.models:
        assert grown("generation_tokens_total", model=name) == written[name]
    assert sum(written.values()) == sum(usage["completion_tokens"] for usage in usages)
    assert grown("prompt_tokens_total") == sum(usage["prompt_tokens"] for usage in usages)
    assert grown("handoffs_total") == sum(usage["trserve"]["handoffs"] for usage in usages) > 0
    ended = [grown("requests_total", finish_reason=why) for why in ("stop", "length")]
    assert sum(ended) == answers
    assert grown("e2e_request_latency_seconds_count") == answers
    assert grown("time_to_first_token_seconds_count") == answers
    assert grown("inter_token_latency_seconds_count") == sum(written.values()) - answers
    assert grown("request_generation_tokens_sum") == sum(written.values())
    assert grown("request_handoffs_sum") == grown("handoffs_total")
    pending_s = sum(usage["trserve"]["pending_ms"] for usage in usages) / 1e3
    assert grown("request_pending_time_seconds_sum") == pytest.approx(pending_s)
    assert 0 < grown("inter_token_latency_seconds_sum") < grown("e2e_request_latency_seconds_sum")
    for name in server.models:
        assert grown("steps_total", model=name) > 0


def test_counters_only_grow_and_no_series_come_with_requests(server):
    """While requests are under way; live ones are counted before they end."""
    scrapes = [settled(server)]
    done = threading.Event()

    def work(index: int) -> None:
        if index == 0:
            while not done.is_set():
                scrapes.append(scrape(server))
            return
        try:
            ask(server, {**GREEDY, "prompt": [index + 9], "max_tokens": 200, "ignore_eos": True})
        finally:
            done.set()

    concurrently(work, range(5), 5)
    scrapes.append(settled(server))
    for earlier, later in itertools.pairwise(scrapes):
        assert earlier.keys() == later.keys()
        shrunk = {k for k, number in counters(earlier).items() if later[k] < number}
        assert not shrunk
    middle = [
        sum(value(s, "generation_tokens_total", model=m) for m in server.models) for s in scrapes
    ]
    assert len(set(middle)) > 2, "tokens of running requests are counted"


def test_workers_blocks_and_processes(server):
    found = settled(server)
    for name in server.models:
        states = [
            value(found, "kv_blocks", model=name, state=s) for s in ("free", "cached", "used")
        ]
        assert sum(states) == value(found, "kv_blocks_capacity", model=name) > 0
        assert states[2] == 0
        assert value(found, "worker_status", model=name, status="up") == 1
        assert value(found, "worker_status", model=name, status="lost") == 0
        for state in ("running", "pending"):
            assert value(found, "worker_requests", model=name, state=state) == 0
        early = [
            value(found, f"early_prefill_tokens{end}_total", model=name) for end in ("", "_used")
        ]
        assert early[0] >= early[1]
        for metric in ("kv_repairs", "worker_restarts"):
            assert (f"trserve_{metric}_total", (("model", name),)) in found
            assert value(found, f"{metric}_total", model=name) == 0
    names = ["launcher", "gateway", *(f"worker-{n}" for n in range(len(server.models)))]
    memory = {n: value(found, "process_resident_memory_bytes", process=n) for n in names}
    assert min(memory.values()) > 1e6
    assert memory["gateway"] < GATEWAY_BYTES


def test_ends_that_are_none_of_the_models(server):
    before = settled(server)
    stream = server.stream(COMPLETIONS, {"prompt": [5], "max_tokens": 200, "ignore_eos": True})
    next(stream)
    stream.close()
    assert server.request("POST", COMPLETIONS, {"prompt": ""}).status == 400
    after = settled(server)
    left = [value(s, "requests_total", finish_reason="abort") for s in (before, after)]
    assert left[1] == left[0] + 1
    refused = [value(s, "request_errors_total", status="400", code="") for s in (before, after)]
    assert refused[1] == refused[0] + 1


def test_a_stop_string_leaves_overshoot_that_is_no_token_of_an_answer(server):
    before = settled(server)
    body = {**GREEDY, "prompt": [5, 6], "max_tokens": 100, "ignore_eos": True}
    text = server.post(COMPLETIONS, body)["choices"][0]["text"]
    usage = ask(server, body | {"stop": [text[10:14]]})
    after = settled(server)
    written = sum(
        value(after, "generation_tokens_total", model=name)
        - value(before, "generation_tokens_total", model=name)
        for name in server.models
    )
    assert written == 100 + usage["completion_tokens"]
    for name in server.models:
        assert ("trserve_overshoot_tokens_total", (("model", name),)) in after


def test_openmetrics_and_head(server):
    accept = {"accept": "application/openmetrics-text; version=1.0.0"}
    response = server.request("GET", "/metrics", headers=accept)
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    names = {family.name for family in parse_openmetrics(response.body.decode())}
    assert "trserve_generation_tokens" in names
    head = server.request("HEAD", "/metrics")
    assert (head.status, head.body) == (200, b"")
    assert server.request("POST", "/metrics", {}).status == 405


def summed_up(server: Server) -> dict[Sample, float]:
    """Once the workers have summed up what they measured, which they do within half a second."""
    settled(server)
    before, found = {}, scrape(server)
    while counters(before) != counters(found):
        time.sleep(0.7)
        before, found = found, scrape(server)
    return found


def test_handoffs_are_in_every_phase_and_tokens_of_every_kind(server):
    """What the workers measured agrees with what the answers said."""
    before = summed_up(server)
    fields = {"temperature": 0, "trserve": {"router": {"tau": 0.15}}}  # both ways, often
    fields |= {"max_tokens": 40, "ignore_eos": True}
    usages = concurrently(
        lambda index: ask(server, {**fields, "prompt": [5 + index, 6, 7]}), range(16), 4
    )  # so many that every model asks its router more often than it looks at the clock
    moved = sum(usage["trserve"]["handoffs"] for usage in usages)

    def grown(metric: str, **labels: str) -> float:
        return value(after, metric, **labels) - value(before, metric, **labels)

    def phase(name: str) -> float:
        pairs = itertools.permutations(server.models, 2)
        return sum(
            grown("handoff_seconds_count", src=src, dst=dst, phase=name) for src, dst in pairs
        )

    after = summed_up(server)
    assert phase("send") == phase("admission") == phase("exec") == phase("total") == moved > 0
    kinds = ("first", "resume", "append", "reprefill")
    received = [grown("handoff_kind_total", model=m, kind=k) for m in server.models for k in kinds]
    assert sum(received) == moved
    small, large = server.models
    assert grown("handoff_kind_total", model=small, kind="resume") > 0
    for name in server.models:
        written = sum(usage["trserve"]["tokens"].get(name, 0) for usage in usages)
        assert grown("tokens_total", model=name, kind="committed") == written
        assert grown("generation_tokens_total", model=name) == written
        assert grown("tokens_total", model=name, kind="overshoot") == 0
        # A prompt that was computed early is a batch, and nobody's step.
        early = grown("batch_size_count", model=name) - grown("steps_total", model=name)
        assert 0 <= early <= len(usages)
        assert grown("router_seconds_count", router="r-stitch", model=name) > 0
        assert value(after, "cost_units_total", model=name) > 0
        busy = grown("model_busy_seconds_total", model=name)
        steps = [
            grown("step_seconds_sum", model=name, batch_bucket=each) for each in ("1", "2", "4")
        ]
        assert 0 < sum(steps) < busy
        assert 0 <= value(after, "model_utilization", model=name) <= 1
    sent = grown("handoff_seconds_count", src=small, dst=large, phase="send")
    assert grown("tokens_total", model=small, kind="discarded") == sent, "r-stitch keeps none"
    arrivals = sum(grown("batch_admission_delay_seconds_count", model=m) for m in server.models)
    assert arrivals == moved + len(usages)
    whole, parts = (
        [grown("handoff_seconds_sum", src=small, dst=large, phase=each) for each in names]
        for names in (("total",), ("admission", "exec"))
    )
    assert sum(parts) == pytest.approx(whole[0])
    assert grown("threshold_overrides_total", by="request") == len(usages)
    assert value(after, "threshold", router="r-stitch") > 0
