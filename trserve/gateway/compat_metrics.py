"""The core metrics under the names that dashboards and autoscalers for vLLM and SGLang read, too.

One table says which of ours each is; what we have no equal of is not there. Several models stand
behind one endpoint, so counts are their sum, and of KV caches the fullest counts. Knows no slab.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from prometheus_client.metrics_core import Metric

_PREFIX: Final = "trserve_"
Labels = Mapping[str, str]
Samples = Mapping[str, Sequence[tuple[Labels, float]]]
"""Labels and value of every series, by the name of its samples without our prefix."""


class Alias(NamedTuple):
    """A metric of another server's.

    Attributes:
        name: theirs, without the prefix and ``_total``.
        source: ours, likewise, whose series are summed; or what computes it.
        kind: its type, where it is computed.
        rename: a label of ours that it has, by the name that it has there.
        only: the one value of a label of ours that counts.
    """

    name: str
    source: str | Callable[[Samples, int], float]
    kind: str = "gauge"
    rename: tuple[str, str] | None = None
    only: tuple[str, str] | None = None


def _used_shares(samples: Samples) -> list[float]:
    """Of each model's KV blocks, those that a request holds."""
    capacity = {labels["model"]: value for labels, value in samples["kv_blocks_capacity"]}
    return [
        value / max(1.0, capacity[labels["model"]])
        for labels, value in samples["kv_blocks"]
        if labels["state"] == "used"
    ]


def _kv_usage(samples: Samples, block_size: int) -> float:
    return max(_used_shares(samples), default=0.0)


def _kv_tokens(samples: Samples, block_size: int) -> float:
    return min((value for _, value in samples["kv_blocks_capacity"]), default=0.0) * block_size


def _kv_used_tokens(samples: Samples, block_size: int) -> float:
    used = [value for labels, value in samples["kv_blocks"] if labels["state"] == "used"]
    return max(used, default=0.0) * block_size


def _kv_free_tokens(samples: Samples, block_size: int) -> float:
    return max(0.0, _kv_tokens(samples, block_size) * (1.0 - _kv_usage(samples, block_size)))


def _retracted(samples: Samples, block_size: int) -> float:
    return sum(value for _, value in samples["kv_drops_total"])


def _hit_rate(samples: Samples, block_size: int) -> float:
    queries, hits = (
        sum(value for _, value in samples[f"prefix_cache_{each}_total"])
        for each in ("queries", "hits")
    )
    return hits / queries if queries else 0.0


def _plain(*names: str) -> list[Alias]:
    """Metrics that are called the same."""
    return [Alias(name, name) for name in names]


_LATENCIES: Final = _plain(
    "time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"
)
_OLD_LATENCY: Final = Alias("time_per_output_token_seconds", "inter_token_latency_seconds")

ALIASES: Final[Mapping[str, Sequence[Alias]]] = {
    "vllm": [
        *_plain("num_requests_running", "num_requests_waiting"),
        Alias("kv_cache_usage_perc", _kv_usage),
        Alias("gpu_cache_usage_perc", _kv_usage),
        *_plain("prefix_cache_queries", "prefix_cache_hits", "prompt_tokens", "generation_tokens"),
        Alias("num_preemptions", "kv_drops"),
        Alias("request_success", "requests", rename=("finish_reason", "finished_reason")),
        *_LATENCIES,
        _OLD_LATENCY,
        *_plain(
            "request_queue_time_seconds",
            "request_inference_time_seconds",
            "request_prefill_time_seconds",
            "request_decode_time_seconds",
            "request_time_per_output_token_seconds",
            "request_prompt_tokens",
            "request_generation_tokens",
            "request_params_n",
            "request_params_max_tokens",
        ),
        # Theirs counts prompts' tokens too; how many a step had of these nobody keeps here.
        Alias("iteration_tokens_total", "step_rows"),
    ],
    "sglang": [
        Alias("num_running_reqs", "num_requests_running"),
        Alias("num_queue_reqs", "num_requests_waiting"),
        Alias("num_used_tokens", _kv_used_tokens),
        Alias("kv_used_tokens", _kv_used_tokens),
        Alias("kv_available_tokens", _kv_free_tokens),
        Alias("max_total_num_tokens", _kv_tokens),
        Alias("token_usage", _kv_usage),
        Alias("cache_hit_rate", _hit_rate),
        Alias("num_retracted_requests", "kv_drops"),
        Alias("num_retracted_reqs", _retracted),
        Alias("cached_tokens", "prefix_cache_hits"),
        *_plain("prompt_tokens", "generation_tokens"),
        Alias("num_requests", "requests"),
        Alias("num_aborted_requests", "requests", only=("finish_reason", "abort")),
        *_LATENCIES,
        _OLD_LATENCY,
        Alias("queue_time_seconds", "request_queue_time_seconds"),
        *_plain("request_time_per_output_token_seconds"),
    ],
}
_LABELS: Final = {"vllm": {"engine": "0"}, "sglang": dict[str, str]()}


class Compatibility:
    """Makes the aliases of a server.

    Args:
        wanted: ``vllm``, ``sglang``, both or neither.
        model: what the endpoint's model is called.
        block_size: tokens in a KV block.
    """

    def __init__(self, wanted: Collection[str], model: str, block_size: int) -> None:
        self._wanted = wanted
        self._model = model
        self._block_size = block_size
        self._throughput = _Throughput()

    def aliases(self, families: Iterable[Metric]) -> Iterator[Metric]:
        """The wanted names for what ``families``, all of ours, say."""
        if not self._wanted:
            return
        by_name = {family.name.removeprefix(_PREFIX): family for family in families}
        samples = _samples(by_name.values())
        for server in self._wanted:
            labels = {"model_name": self._model, **_LABELS[server]}
            for alias in ALIASES[server]:
                yield self._alias(f"{server}:", alias, labels, by_name, samples)
            if server == "vllm":
                yield self._cache_config(labels, samples)
            if server == "sglang":
                written = sum(value for _, value in samples["generation_tokens_total"])
                value = self._throughput.at(time.monotonic(), written)
                text = "Tokens a second since the scrape before, of at least a second ago."
                yield _gauge("sglang:gen_throughput", text, labels, value)

    def _cache_config(self, labels: Labels, samples: Samples) -> Metric:
        """vLLM's way to tell the size of the KV cache: a gauge of 1 whose labels have it."""
        blocks = int(min((value for _, value in samples["kv_blocks_capacity"]), default=0.0))
        sizes = {"block_size": str(self._block_size), "num_gpu_blocks": str(blocks)}
        text = "KV blocks, of several models the one with the fewest; they may be in host memory."
        return _gauge("vllm:cache_config_info", text, {**labels, **sizes}, 1.0)

    def _alias(
        self,
        prefix: str,
        alias: Alias,
        labels: Labels,
        by_name: Mapping[str, Metric],
        samples: Samples,
    ) -> Metric:
        if callable(alias.source):
            text = f"{prefix[:-1]}'s name; of several models, the one that has the least left."
            return _gauge(
                prefix + alias.name, text, labels, alias.source(samples, self._block_size)
            )
        return _copy(prefix, alias, labels, by_name[alias.source])


def _copy(prefix: str, alias: Alias, labels: Labels, source: Metric) -> Metric:
    """``source`` under its other name, its series summed."""
    name = prefix + alias.name
    found = Metric(name, f"{source.documentation} (as {source.name})", source.type)
    sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = defaultdict(float)
    for sample in source.samples:
        if alias.only is not None and sample.labels[alias.only[0]] != alias.only[1]:
            continue
        kept = {"le": sample.labels["le"]} if "le" in sample.labels else {}
        if alias.rename is not None:
            ours, theirs = alias.rename
            kept[theirs] = sample.labels[ours]
        sums[name + sample.name.removeprefix(source.name), tuple(kept.items())] += sample.value
    for (sample_name, kept_labels), value in sums.items():
        found.add_sample(sample_name, {**labels, **dict(kept_labels)}, value)
    return found


def _gauge(name: str, text: str, labels: Labels, value: float) -> Metric:
    metric = Metric(name, text, "gauge")
    metric.add_sample(name, dict(labels), value)
    return metric


def _samples(families: Iterable[Metric]) -> Samples:
    found: dict[str, list[tuple[Labels, float]]] = defaultdict(list)
    for family in families:
        for sample in family.samples:
            found[sample.name.removeprefix(_PREFIX)].append((sample.labels, sample.value))
    return found


class _Throughput:
    """A rate between scrapes; those that follow within a second share one."""

    def __init__(self) -> None:
        self._at_s = 0.0
        self._written: float | None = None
        self._rate = 0.0

    def at(self, now: float, written: float) -> float:
        """Tokens a second up to ``now``, when ``written`` there were in all."""
        if self._written is None or now - self._at_s >= 1.0:
            if self._written is not None:
                self._rate = (written - self._written) / (now - self._at_s)
            self._at_s, self._written = now, written
        return self._rate
