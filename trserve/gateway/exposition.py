"""``/metrics``: what the gateway counted and what the workers say, in Prometheus' text formats.

Everything is read at the moment of a scrape, from the gateway's own numbers and the slab's
single-writer words; no label has more values than there are models, states or reasons. Changes
nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector, CollectorRegistry

from trserve import __version__
from trserve.gateway.compat_metrics import Compatibility
from trserve.gateway.dispatcher import Dispatcher
from trserve.gateway.generation import Generation
from trserve.gateway.metrics import Histogram
from trserve.gateway.process_memory import resident_bytes
from trserve.gateway.routing_metrics import RoutingMetrics, Served, Tokens
from trserve.gateway.scheduling_metrics import scheduling_metrics
from trserve.gateway.service import Service
from trserve.gateway.slots import SlotTable
from trserve.gpus.plan import MpsState
from trserve.ipc.slab import Slab

_WORKER_COUNTERS: Final = {
    "steps": ("steps", "Forward passes."),
    "kv_drops": ("kv_drops", "Requests whose KV blocks were taken; they compute them again."),
    "kv_repairs": ("kv_repairs", "Recounts of the KV blocks that did not add up."),
    "cache_queried_tokens": ("prefix_cache_queries", "Tokens looked up in the prefix cache."),
    "cache_hit_tokens": ("prefix_cache_hits", "Tokens found in the prefix cache."),
    "cache_evictions": ("prefix_cache_evictions", "Blocks that left the prefix cache."),
    "early_tokens": ("early_prefill_tokens", "Prompt tokens computed before a request came."),
    "early_tokens_used": ("early_prefill_tokens_used", "Those of requests that came then."),
}
"""By worker word: the metric's name and help."""


class Exposition(Collector):
    """Collects the metrics of one server."""

    def __init__(
        self, service: Service, slab: Slab, slots: SlotTable, dispatcher: Dispatcher
    ) -> None:
        self._service = service
        self._slab = slab
        self._slots = slots
        self._dispatcher = dispatcher
        self._names = service.model_names
        plan = service.plan
        self._compatibility = Compatibility(
            plan.endpoint.metrics_compat, plan.served_names[0], plan.block_size
        )
        served = Served(
            self._names,
            service.router_name,
            [model.active_parameters for model in plan.models],
            plan.endpoint.handoff_buckets_s,
        )
        self._routing = RoutingMetrics(slab, served)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def render(self, accept: str) -> tuple[bytes, bytes]:
        """The body and its content type, for a client that accepts these types."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type.encode()

    def describe(self) -> Iterable[Metric]:
        """Nothing is asked at registration."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """All metrics, as they are now."""
        own = [
            *self._requests(),
            *self._tokens(),
            *self._times(),
            *self._workers(),
            *scheduling_metrics(self._slab, self._names),
            *self._routing.collect(
                Tokens(self._written(), self._slots.overshoot),
                self._service.metrics.threshold_overrides,
            ),
            *self._server(),
        ]
        return itertools.chain(own, self._compatibility.aliases(own))

    # -- requests ----------------------------------------------------------------------------

    def _requests(self) -> Iterator[Metric]:
        metrics, dispatcher, slots = self._service.metrics, self._dispatcher, self._slots
        finished = {"stop": 0, "length": 0, "abort": 0, "error": 0, **metrics.finished}
        yield _counter(
            "requests",
            "Answers that ended, one for each choice, by finish reason.",
            "finish_reason",
            finished,
        )
        errors = CounterMetricFamily(
            "trserve_request_errors",
            "Error responses; an error within a stream is a finish reason alone.",
            labels=("status", "code"),
        )
        for (status, code), count in metrics.errors.items():
            errors.add_metric((str(status), code), count)
        yield errors
        yield _gauge("num_requests_running", "Answers that hold a slot.", dispatcher.num_live)
        yield _gauge("num_requests_waiting", "Requests in the queue.", dispatcher.num_waiting)
        states = {
            "free": slots.num_free,
            "live": dispatcher.num_live,
            "closing": slots.num_closing,
        }
        yield _gauges("slots", "Slots of the slab.", "state", states)
        yield _gauge(
            "annotation_pages_free", "Free pages for logprobs and traces.", slots.num_free_pages
        )

    def _tokens(self) -> Iterator[Metric]:
        metrics = self._service.metrics
        live = self._live()
        yield _total("prompt_tokens", "Prompt tokens, each prompt once.", metrics.prompt_tokens)
        written = dict(zip(self._names, self._written(), strict=True))
        yield _counter("generation_tokens", "Tokens of answers, by writer.", "model", written)
        overshoot = dict(zip(self._names, self._slots.overshoot, strict=True))
        yield _counter(
            "overshoot_tokens",
            "Tokens written after an answer had ended by a stop string or its client had left.",
            "model",
            overshoot,
        )
        handoffs = metrics.handoffs + sum(generation.handoffs for generation in live)
        yield _total("handoffs", "Moves of a request from one model to another.", handoffs)

    def _live(self) -> list[Generation]:
        return [generation for generation in self._dispatcher.live if not generation.ended]

    def _written(self) -> list[int]:
        """Tokens of answers, by model."""
        live, ended = self._live(), self._service.metrics.generation_tokens
        return [tokens + sum(g.counts[model] for g in live) for model, tokens in enumerate(ended)]

    def _times(self) -> Iterator[Metric]:
        metrics = self._service.metrics
        complete = "; of answers that ended with stop or length."
        for name, text, values in (
            ("request_queue_time_seconds", "From a request to its slot.", metrics.queue_time),
            (
                "time_to_first_token_seconds",
                "From a request to its first committed token.",
                metrics.time_to_first_token,
            ),
            (
                "inter_token_latency_seconds",
                "Between two tokens: an answer's mean, once for each of its gaps" + complete,
                metrics.inter_token_latency,
            ),
            (
                "e2e_request_latency_seconds",
                "From a request to its last token" + complete,
                metrics.latency,
            ),
            (
                "request_prefill_time_seconds",
                "From a slot to the first committed token.",
                metrics.prefill_time,
            ),
            (
                "request_decode_time_seconds",
                "From the first token to the last" + complete,
                metrics.decode_time,
            ),
            (
                "request_inference_time_seconds",
                "From a slot to the last token" + complete,
                metrics.inference_time,
            ),
            (
                "request_pending_time_seconds",
                "How long it was away from its first model" + complete,
                metrics.pending_time,
            ),
            ("request_prompt_tokens", "Prompt tokens" + complete, metrics.request_prompt_tokens),
            (
                "request_generation_tokens",
                "Tokens" + complete,
                metrics.request_generation_tokens,
            ),
            ("request_handoffs", "Handoffs" + complete, metrics.request_handoffs),
            (
                "request_time_per_output_token_seconds",
                "An answer's mean time between two tokens, once an answer" + complete,
                metrics.request_time_per_token,
            ),
            (
                "request_params_n",
                "Answers that a prompt was to have.",
                metrics.request_params_n,
            ),
            (
                "request_params_max_tokens",
                "Tokens that an answer might have, of requests that said so.",
                metrics.request_params_max_tokens,
            ),
        ):
            yield _histogram(name, text, values)

    # -- workers -----------------------------------------------------------------------------

    def _workers(self) -> Iterator[Metric]:
        states = self._service.states
        status = GaugeMetricFamily(
            "trserve_worker_status", "1 for the state that it is in.", labels=("model", "status")
        )
        for model, name in enumerate(self._names):
            for state in states.kinds:
                status.add_metric((name, state), states.status(model) == state)
        yield status
        yield from self._sharing()
        restarts = dict(zip(self._names, states.restarts, strict=True))
        yield _counter("worker_restarts", "Restarts since the gateway began.", "model", restarts)
        for word, (metric, text) in _WORKER_COUNTERS.items():
            yield _counter(metric, text, "model", self._words(word))
        yield self._by_state("worker_requests", "Resident requests.", ("running", "pending"))
        yield from self._blocks()

    def _sharing(self) -> Iterator[Metric]:
        """Nothing where no model is on a GPU."""
        if mps := self._service.states.mps:
            family = GaugeMetricFamily(
                "trserve_mps_status",
                "1 for how the model shares its GPU: through CUDA MPS, or not.",
                labels=("model", "status"),
            )
            for name, (found, _) in zip(self._names, mps, strict=True):
                for state in MpsState:
                    family.add_metric((name, state.value), found == state)
            yield family

    def _blocks(self) -> Iterator[Metric]:
        total, free, cached = map(self._words, ("total_blocks", "free_blocks", "cached_blocks"))
        blocks = GaugeMetricFamily(
            "trserve_kv_blocks", "KV blocks by state.", labels=("model", "state")
        )
        for name in self._names:
            used = total[name] - free[name] - cached[name]
            for state, count in ("free", free[name]), ("cached", cached[name]), ("used", used):
                blocks.add_metric((name, state), count)
        yield blocks
        yield _gauges("kv_blocks_capacity", "KV blocks that there are.", "model", total)

    def _by_state(self, metric: str, text: str, words: tuple[str, ...]) -> Metric:
        family = GaugeMetricFamily(f"trserve_{metric}", text, labels=("model", "state"))
        for word in words:
            for name, value in self._words(word).items():
                family.add_metric((name, word), value)
        return family

    def _words(self, word: str) -> dict[str, int]:
        """One word of every worker, by model."""
        words = (worker.get(word) for worker in self._slab.workers)
        return dict(zip(self._names, words, strict=True))

    # -- the server --------------------------------------------------------------------------

    def _server(self) -> Iterator[Metric]:
        yield _gauges(
            "process_resident_memory_bytes",
            "Resident memory, shared pages included.",
            "process",
            resident_bytes(),
        )
        info = {"version": __version__, "router": self._service.router_name}
        yield InfoMetricFamily("trserve_build", "What is running.", value=info)


def _total(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"trserve_{name}", text, value=value)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"trserve_{name}", text, value=value)


def _counter(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    return _family(CounterMetricFamily, name, text, label, values)


def _gauges(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    return _family(GaugeMetricFamily, name, text, label, values)


def _family(
    make: Callable[..., CounterMetricFamily | GaugeMetricFamily],
    name: str,
    text: str,
    label: str,
    values: Mapping[str, float],
) -> Metric:
    family = make(f"trserve_{name}", text, labels=(label,))
    for key, value in values.items():
        family.add_metric((key,), value)
    return family


def _histogram(name: str, text: str, values: Histogram) -> Metric:
    bounds = [*(str(float(bound)) for bound in values.bounds), "+Inf"]
    buckets = list(zip(bounds, itertools.accumulate(values.counts), strict=True))
    return HistogramMetricFamily(f"trserve_{name}", text, buckets=buckets, sum_value=values.total)
