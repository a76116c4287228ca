"""What ``/metrics`` says of routing: handoffs and their phases, steps, the router, what it costs.

Read at the moment of a scrape from the workers' meters and tallies. Knows no requests and changes
nothing; names and labels are those that docs/metrics.md lists.
"""

from __future__ import annotations

import itertools
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from trserve.ipc.meter import STEP_ROWS, HistogramWords, Meter, read_meter
from trserve.ipc.slab import Slab
from trserve.ipc.tally import read_tally

_NS: Final = 1e9
_UNIT: Final = 1e9
"""Weights that a token meets for one unit of cost."""

_KINDS: Final = ("first", "resume", "append", "reprefill")
_HOOKS: Final = ("route", "send", "receive", "admit", "score")
_LEAST_S: Final = 1.0


class Served(NamedTuple):
    """What the gateway knows beside the slab.

    Attributes:
        names: the models'; router: the router's.
        active_parameters: by model, weights that a token meets; 0 where nobody counted.
        bounds_s: of times of handoffs and steps, as the workers were told.
    """

    names: Sequence[str]
    router: str
    active_parameters: Sequence[int]
    bounds_s: Sequence[float]


class Tokens(NamedTuple):
    """Tokens by model: of answers, and written behind their ends."""

    committed: Sequence[int]
    overshoot: Sequence[int]


class RoutingMetrics:
    """Makes the metrics of one server."""

    def __init__(self, slab: Slab, served: Served) -> None:
        self._slab = slab
        self._served = served
        self._busy = _Shares(len(served.names))

    def collect(self, tokens: Tokens, overrides: Mapping[str, int]) -> Iterator[Metric]:
        """All of them, as they are now; ``overrides``: thresholds that were set, by whom."""
        models = range(len(self._served.names))
        meters = [read_meter(self._slab, model, self._served.bounds_s) for model in models]
        yield from self._tokens(tokens)
        yield self._handoffs(meters)
        yield from self._by_model(meters)
        yield self._steps(meters)
        yield from self._kinds(meters)
        yield from self._router(meters, overrides)
        yield from self._utilization(meters)

    def _tokens(self, tokens: Tokens) -> Iterator[Metric]:
        names = self._served.names
        family = CounterMetricFamily(
            "trserve_tokens",
            "Sampled tokens: of answers, of routed requests that did not count, and behind ends.",
            labels=("model", "kind"),
        )
        cost = CounterMetricFamily(
            "trserve_cost_units",
            "Sampled tokens times the weights that each meets, in billions; prompts left out.",
            labels=("model",),
        )
        for model, name in enumerate(names):
            tally = read_tally(self._slab, model)
            kinds = {
                "committed": tokens.committed[model],
                "discarded": int((tally.moved - tally.committed).sum()),
                "overshoot": tokens.overshoot[model],
            }
            for kind, count in kinds.items():
                family.add_metric((name, kind), count)
            weights = self._served.active_parameters[model]
            cost.add_metric((name,), sum(kinds.values()) * weights / _UNIT)
        yield from (family, cost)

    def _handoffs(self, meters: Sequence[Meter]) -> Metric:
        """Send is what the sender measured; the other phases, who received it."""
        family = HistogramMetricFamily(
            "trserve_handoff_seconds",
            "Of a handoff: from its decision until all of the step is published (send), from there "
            "to the step that takes it (admission), this step (exec), and the last two (total).",
            labels=("src", "dst", "phase"),
        )
        for (one, name), (other, other_name) in itertools.permutations(
            enumerate(self._served.names), 2
        ):
            for phase, by_peer in meters[one].by_peer.items():
                ends = (name, other_name) if phase == "send" else (other_name, name)
                _add_seconds(family, (*ends, phase), by_peer[other])
        return family

    def _by_model(self, meters: Sequence[Meter]) -> Iterator[Metric]:
        for name, text, key, unit in (
            (
                "batch_admission_delay_seconds",
                "From a request's coming to a model to the step that takes it.",
                "arrival",
                _NS,
            ),
            (
                "pending_seconds",
                "From a request's leaving a model to its coming back.",
                "away",
                _NS,
            ),
            ("batch_size", "Requests in a step.", "batch_rows", 1.0),
            (
                "tokens_between_handoffs",
                "Tokens committed between a request's coming and its being handed on.",
                "visit_tokens",
                1.0,
            ),
        ):
            family = HistogramMetricFamily(f"trserve_{name}", text, labels=("model",))
            for model, meter in zip(self._served.names, meters, strict=True):
                _add(family, (model,), meter.single[key], unit)
            yield family

    def _steps(self, meters: Sequence[Meter]) -> Metric:
        family = HistogramMetricFamily(
            "trserve_step_seconds",
            "Steps without prompts, by the most requests of their class.",
            labels=("model", "batch_bucket"),
        )
        classes = [*map(str, STEP_ROWS), "more"]
        # No step has more rows than there are slots.
        classes = classes[: 1 + bisect_left(STEP_ROWS, self._slab.layout.slots)]
        for model, meter in zip(self._served.names, meters, strict=True):
            for each, words in zip(classes, meter.steps, strict=False):
                _add_seconds(family, (model, each), words)
        return family

    def _kinds(self, meters: Sequence[Meter]) -> Iterator[Metric]:
        kinds = CounterMetricFamily(
            "trserve_handoff_kind",
            "Handoffs by what the receiver had: nothing yet (first), all but the last token "
            "(resume) or several (append), or less than it once had (reprefill).",
            labels=("model", "kind"),
        )
        again = CounterMetricFamily(
            "trserve_reprefill_tokens",
            "Tokens that reprefills compute again.",
            labels=("model",),
        )
        for model, meter in zip(self._served.names, meters, strict=True):
            for kind in _KINDS:
                kinds.add_metric((model, kind), meter.counters[kind])
            again.add_metric((model,), meter.counters["reprefill_tokens"])
        yield from (kinds, again)

    def _router(self, meters: Sequence[Meter], overrides: Mapping[str, int]) -> Iterator[Metric]:
        router = self._served.router
        seconds = HistogramMetricFamily(
            "trserve_router_seconds",
            "Asking the router about a step, of one step in sixteen.",
            labels=("router", "model"),
        )
        errors = CounterMetricFamily(
            "trserve_router_errors",
            "Calls that raised or returned nothing valid; of route, batches and single rows.",
            labels=("router", "model", "hook"),
        )
        for model, meter in zip(self._served.names, meters, strict=True):
            _add_seconds(seconds, (router, model), meter.single["router"])
            for hook in _HOOKS:
                errors.add_metric((router, model, hook), meter.counters[f"failed_{hook}"])
        yield from (seconds, errors)
        threshold = GaugeMetricFamily(
            "trserve_threshold",
            "The router's first parameter in force, for requests without one of their own.",
            labels=("router",),
        )
        if meters[0].threshold is not None:
            threshold.add_metric((router,), meters[0].threshold)
        yield threshold
        counts = CounterMetricFamily(
            "trserve_threshold_overrides",
            "Changes of the router's parameters: requests with values of their own, and changes "
            "of the server's by an administrator.",
            labels=("by",),
        )
        for who, count in overrides.items():
            counts.add_metric((who,), count)
        yield counts

    def _utilization(self, meters: Sequence[Meter]) -> Iterator[Metric]:
        busy_s = [meter.counters["busy_ns"] / _NS for meter in meters]
        seconds = CounterMetricFamily(
            "trserve_model_busy_seconds", "Time in steps, prompts included.", labels=("model",)
        )
        share = GaugeMetricFamily(
            "trserve_model_utilization",
            "Share of time in steps since the scrape before, of at least a second ago.",
            labels=("model",),
        )
        shares = self._busy.at(time.monotonic(), busy_s)
        for name, total, value in zip(self._served.names, busy_s, shares, strict=True):
            seconds.add_metric((name,), total)
            share.add_metric((name,), value)
        yield from (seconds, share)


class _Shares:
    """Shares of the time between two looks; looks within a second of each other share them."""

    def __init__(self, models: int) -> None:
        self._at_s = time.monotonic()
        self._before = [0.0] * models
        self._shares = [0.0] * models

    def at(self, now_s: float, busy_s: Sequence[float]) -> Sequence[float]:
        """The shares up to ``now_s``, when so many seconds were busy in all."""
        elapsed_s = now_s - self._at_s
        if elapsed_s >= _LEAST_S:
            grown = (new - old for new, old in zip(busy_s, self._before, strict=True))
            self._shares = [min(1.0, each / elapsed_s) for each in grown]
            self._at_s, self._before = now_s, list(busy_s)
        return self._shares


def _add_seconds(
    family: HistogramMetricFamily, labels: Iterable[str], words: HistogramWords
) -> None:
    _add(family, labels, words, _NS)


def _add(
    family: HistogramMetricFamily, labels: Iterable[str], words: HistogramWords, unit: float
) -> None:
    bounds = [*(str(float(bound)) for bound in words.bounds), "+Inf"]
    upto = itertools.accumulate(words.counts)
    family.add_metric(list(labels), list(zip(bounds, upto, strict=True)), words.total / unit)
