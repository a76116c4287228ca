"""The other servers' metric names, and that what is deployed reads metrics that there are."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.gateway.stack import new_plan
from tests.gateway.test_metrics import Front, run
from trserve.endpoint_plan import EndpointPlan
from trserve.gateway.compat_metrics import ALIASES, _kv_free_tokens, _kv_used_tokens, _Throughput
from trserve.gateway.exposition import Exposition
from trserve.gateway.metrics import Metrics

DEPLOY = Path(__file__).parents[2] / "deploy"
ALERTS = DEPLOY / "prometheus" / "alerts.yml"
DASHBOARD = DEPLOY / "grafana" / "trserve.json"
NAMES = ("vllm", "sglang")
Series = Mapping[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(front: Front, *wanted: str) -> Series:
    plan = front.service.plan
    endpoint = EndpointPlan(metrics_compat=wanted)
    front.service.plan = new_plan(Path(plan.tokenizer_path), endpoint=endpoint)  # type: ignore[misc]
    text = Exposition(front.service, front.w.slab, front.w.slots, front.dispatcher).render("")[0]
    front.service.plan = plan  # type: ignore[misc]
    found: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for family in text_string_to_metric_families(text.decode()):
        assert family.documentation and family.type != "unknown", family.name
        for sample in family.samples:
            key = sample.name, frozenset(sample.labels.items())
            assert key not in found, "a series stands there twice"
            found[key] = sample.value
    return found


def value(series: Series, name: str, **labels: str) -> float:
    server = {"vllm": {"engine": "0"}, "sglang": {}}[name.partition(":")[0]]
    return series[name, frozenset({"model_name": "trserve", **server, **labels}.items())]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


def test_aliases_say_what_ours_say(folder: Path) -> None:
    async def story(f: Front) -> None:
        await f.submit(prompts=[[1, 2, 3]], max_tokens=6)
        await f.submit(prompts=[[4, 5]], max_tokens=50)
        f.work(4)
        m: Metrics = f.metrics
        found = scrape(f, *NAMES)
        for server, running, waiting in (
            ("vllm", "num_requests_running", "num_requests_waiting"),
            ("sglang", "num_running_reqs", "num_queue_reqs"),
        ):
            assert value(found, f"{server}:{running}") == f.dispatcher.num_live > 0
            assert value(found, f"{server}:{waiting}") == 0
            assert value(found, f"{server}:prompt_tokens_total") == m.prompt_tokens == 5
            written = sum(f.sample("generation_tokens_total", model=name) for name in ("m0", "m1"))
            assert value(found, f"{server}:generation_tokens_total") == written > 0
            count = value(found, f"{server}:time_to_first_token_seconds_count")
            assert count == sum(m.time_to_first_token.counts) == 2
            top = value(found, f"{server}:time_to_first_token_seconds_bucket", le="+Inf")
            assert top == count
        used = [f.sample("kv_blocks", model=name, state="used") for name in ("m0", "m1")]
        all_of = [f.sample("kv_blocks_capacity", model=name) for name in ("m0", "m1")]
        share = max(u / max(1.0, c) for u, c in zip(used, all_of, strict=True))
        assert value(found, "vllm:kv_cache_usage_perc") == share
        assert value(found, "vllm:gpu_cache_usage_perc") == share
        assert value(found, "sglang:token_usage") == share
        assert value(found, "sglang:num_used_tokens") == max(used) * f.service.plan.block_size
        assert value(found, "vllm:request_params_n_count") == 2
        assert value(found, "vllm:request_params_max_tokens_sum") == 56
        blocks = {
            "block_size": str(f.service.plan.block_size),
            "num_gpu_blocks": f"{all_of[0]:.0f}",
        }
        assert value(found, "vllm:cache_config_info", **blocks) == 1
        assert value(found, "sglang:kv_used_tokens") == value(found, "sglang:num_used_tokens")
        f.work(80)
        found = scrape(f, *NAMES)
        for name in ("count", "sum"):
            own = sum(f.sample(f"step_rows_{name}", model=model) for model in ("m0", "m1"))
            assert value(found, f"vllm:iteration_tokens_total_{name}") == own
        spans = value(found, "vllm:request_time_per_output_token_seconds_count")
        assert spans == sum(m.latency.counts) > 0
        ended = value(found, "vllm:request_success_total", finished_reason="length")
        assert ended == f.sample("requests_total", finish_reason="length") > 0
        assert value(found, "sglang:num_requests_total") == sum(m.finished.values())
        assert value(found, "sglang:num_aborted_requests_total") == 0
        parts = [value(found, f"vllm:request_{p}_time_seconds_sum") for p in ("prefill", "decode")]
        whole = value(found, "vllm:request_inference_time_seconds_sum")
        assert sum(parts) == pytest.approx(whole)

    run(story, folder)


def test_they_are_there_only_where_they_are_wanted(folder: Path) -> None:
    async def story(f: Front) -> None:
        for wanted in ((), ("vllm",), ("sglang",), NAMES):
            names = {name.partition(":")[0] for name, _ in scrape(f, *wanted) if ":" in name}
            assert names == set(wanted)
        own = {name for name, _ in scrape(f)}
        assert {name for name, _ in scrape(f, *NAMES) if ":" not in name} == own

    run(story, folder)


def test_names_that_dashboards_and_autoscalers_read(folder: Path) -> None:
    async def story(f: Front) -> None:
        found = {name for name, _ in scrape(f, *NAMES)}
        for name in (
            *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
            *("prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total"),
            *("prompt_tokens_total", "generation_tokens_total", "request_success_total"),
            *("time_to_first_token_seconds_bucket", "inter_token_latency_seconds_sum"),
            *("time_per_output_token_seconds_count", "e2e_request_latency_seconds_bucket"),
            *("request_queue_time_seconds_sum", "request_prompt_tokens_bucket"),
            *("request_params_n_bucket", "request_params_max_tokens_sum", "cache_config_info"),
            *("iteration_tokens_total_bucket", "request_time_per_output_token_seconds_sum"),
        ):
            assert f"vllm:{name}" in found
        for name in (
            *("num_running_reqs", "num_queue_reqs", "num_used_tokens", "token_usage"),
            *("cache_hit_rate", "gen_throughput", "max_total_num_tokens"),
            *("prompt_tokens_total", "generation_tokens_total", "num_requests_total"),
            *("num_aborted_requests_total", "inter_token_latency_seconds_bucket"),
            *("kv_used_tokens", "kv_available_tokens", "cached_tokens_total"),
            *("num_retracted_reqs", "queue_time_seconds_sum"),
            "request_time_per_output_token_seconds_count",
        ):
            assert f"sglang:{name}" in found
        for server in NAMES:
            names = [alias.name for alias in ALIASES[server]]
            assert len(names) == len(set(names))

    run(story, folder)


def test_what_is_used_and_available_is_all_there_is() -> None:
    blocks = [({"model": "a", "state": "used"}, 3.0), ({"model": "b", "state": "used"}, 1.0)]
    samples = {
        "kv_blocks": blocks,
        "kv_blocks_capacity": [({"model": "a"}, 12.0), ({"model": "b"}, 12.0)],
    }
    assert _kv_free_tokens(samples, 4) == 36.0
    assert _kv_used_tokens(samples, 4) == 12.0


def test_throughput_is_a_rate_between_scrapes_a_second_apart() -> None:
    throughput = _Throughput()
    assert throughput.at(10.0, 500.0) == 0.0
    assert throughput.at(12.0, 700.0) == 100.0
    assert throughput.at(12.5, 900.0) == 100.0
    assert throughput.at(14.0, 900.0) == 100.0
    assert throughput.at(15.0, 900.0) == 0.0


def test_buckets_begin_at_a_tenth_of_a_millisecond() -> None:
    metrics = Metrics(2)
    own = Metrics(2, (0.5, 1.0), (0.25,))
    assert own.latency.bounds == own.queue_time.bounds == (0.5, 1.0)
    assert own.inter_token_latency.bounds == own.request_time_per_token.bounds == (0.25,)
    for histogram in (metrics.time_to_first_token, metrics.latency, metrics.inter_token_latency):
        assert histogram.bounds[0] == 0.0001
        assert list(histogram.bounds) == sorted(histogram.bounds)


# -- what is deployed -------------------------------------------------------------------------


def expressions() -> Iterator[str]:
    rules: dict[str, Any] = yaml.safe_load(ALERTS.read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            assert rule["annotations"]["summary"] and rule["labels"]["severity"]
            yield rule["expr"]
    dashboard = json.loads(DASHBOARD.read_text())
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids)) > 10
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            yield target["expr"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]


def test_every_metric_and_label_that_a_rule_or_panel_names_exists(folder: Path) -> None:
    async def story(f: Front) -> None:
        f.metrics.errors[500, "router_error"] += 1
        labels: dict[str, set[str]] = {}
        for name, pairs in scrape(f):
            labels.setdefault(name, {"instance", "job"}).update(key for key, _ in pairs)
        seen = 0
        for expression in expressions():
            names = re.findall(r"\btrserve_\w+", expression)
            assert names or "up{" in expression, expression
            seen += len(names)
            for name in names:
                assert name in labels, expression
            for name, selector in re.findall(r"\b(trserve_\w+)\{([^}]*)\}", expression):
                for label in re.findall(r"(\w+)=~?\"", selector):
                    assert label in labels[name], expression
            for clause in re.findall(r"\bby \(([^)]*)\)", expression):
                for label in clause.split(", "):
                    assert any(label in labels[name] for name in names), expression
            assert expression.count("(") == expression.count(")")
        assert seen > 30

    run(story, folder)


def test_promtool_agrees() -> None:
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool is not installed: the rules were not checked by Prometheus itself")
    done = subprocess.run(
        [tool, "check", "rules", str(ALERTS)], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0, done.stdout + done.stderr
