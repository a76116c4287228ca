"""What ``/metrics`` says of scheduling: gates, where requests went, what the solver predicts.

Read from the slab's single-writer words at the moment of a scrape. Knows no requests and changes
nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from trserve.ipc.estimates import Report, read_report
from trserve.ipc.slab import Slab
from trserve.ipc.tally import read_tally

_OPENINGS: Final = {
    "threshold": "gate_threshold",
    "nobody-runs": "gate_nobody_runs",
    "timeout": "gate_timeout",
    "drain": "gate_drain",
}
_MS: Final = 1e3
_ROWS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


def scheduling_metrics(slab: Slab, names: Sequence[str]) -> Iterator[Metric]:
    """All of them, as they are now; ``names``: the models'."""
    report = read_report(slab)
    yield from _gates(slab, names)
    yield from _throughput(report)
    yield from _estimates(report, names)
    yield _routed(slab, names)
    yield _steps(slab, names)


def _gates(slab: Slab, names: Sequence[str]) -> Iterator[Metric]:
    thresholds = GaugeMetricFamily(
        "trserve_batch_threshold",
        "Requests that a step waits for, at the number of requests that the model saw last.",
        labels=("model",),
    )
    openings = CounterMetricFamily(
        "trserve_gate_openings",
        "Steps by why they began: enough requests, nobody else to wait for, the longest wait is "
        "over, a drain.",
        labels=("model", "reason"),
    )
    for name, words in zip(names, slab.workers, strict=True):
        thresholds.add_metric((name,), words.get("batch_threshold"))
        for reason, word in _OPENINGS.items():
            openings.add_metric((name, reason), words.get(word))
    yield thresholds
    yield openings


def _throughput(report: Report) -> Iterator[Metric]:
    for name, text, value in (
        (
            "predicted_tokens_per_second",
            "What the model promises for the thresholds in force and the requests that are live.",
            report.predicted_tokens_per_s,
        ),
        (
            "eager_predicted_tokens_per_second",
            "What it promises if no model waits.",
            report.eager_tokens_per_s,
        ),
        (
            "measured_tokens_per_second",
            "Of the last seconds in which the number of live requests stood still.",
            report.measured_tokens_per_s,
        ),
        ("live_requests_mean", "Live requests, averaged over about a second.", report.live),
    ):
        yield GaugeMetricFamily(f"trserve_{name}", text, value=value)
    for name, text, value in (
        ("solutions", "How often the batch thresholds were worked out.", report.solutions),
        ("routing_changes", "How often routing was found to have changed.", report.changes),
    ):
        yield CounterMetricFamily(f"trserve_{name}", text, value=value)


def _estimates(report: Report, names: Sequence[str]) -> Iterator[Metric]:
    probabilities = GaugeMetricFamily(
        "trserve_routing_probability",
        "Share of a model's requests that a step sends to a model; its own: those that stay.",
        labels=("model", "to"),
    )
    tokens = GaugeMetricFamily(
        "trserve_committed_tokens_per_step",
        "Tokens that a step commits for a request that it sends there.",
        labels=("model", "to"),
    )
    latencies = GaugeMetricFamily(
        "trserve_step_latency_seconds", "A step at the usual batch width.", labels=("model",)
    )
    for model, name in enumerate(names):
        for to, other in enumerate(names):
            probabilities.add_metric((name, other), report.routing[model, to])
            tokens.add_metric((name, other), report.tokens[model, to])
        latencies.add_metric((name,), report.latency_ms[model] / _MS)
    yield from (probabilities, tokens, latencies)


def _routed(slab: Slab, names: Sequence[str]) -> Metric:
    routed = CounterMetricFamily(
        "trserve_routed_requests",
        "Requests that steps sent to a model; its own: those that stayed or ended.",
        labels=("model", "to"),
    )
    for model, name in enumerate(names):
        for other, count in zip(names, read_tally(slab, model).moved.tolist(), strict=True):
            routed.add_metric((name, other), count)
    return routed


def _steps(slab: Slab, names: Sequence[str]) -> Metric:
    rows = HistogramMetricFamily(
        "trserve_step_rows",
        "Requests in a step, of steps without prompts: each computes one token a request.",
        labels=("model",),
    )
    for model, name in enumerate(names):
        steps = read_tally(slab, model).steps
        upto = np.cumsum(steps)
        buckets = [(str(float(most)), float(upto[min(most, len(upto) - 1)])) for most in _ROWS]
        total = float(steps @ np.arange(len(steps)))
        rows.add_metric((name,), [*buckets, ("+Inf", float(upto[-1]))], total)
    return rows
