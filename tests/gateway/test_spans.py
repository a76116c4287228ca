"""Spans of requests: what is in them, whose children they are, and that off is off."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from tests.gateway.test_http import QUIET, Gateway, get, play, request
from trserve.gateway.desk import Desk
from trserve.gateway.spans import SpanWriter, make_provider
from trserve.gateway.telemetry import span_writer, wanted_exporter

TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


class Traced:
    """A gateway that keeps its spans."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.kept = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.kept))
        gateway.app._desk = Desk(QUIET, spans=SpanWriter(provider, "r-stitch").close)

    async def ask(self, turns: int = 20, *, headers: str = "", **fields: Any) -> ReadableSpan:
        """The span of a request that is read to its end, or left after ``turns`` of the workers."""
        g, errors = self.gateway, self.gateway.service.metrics.errors
        before = errors.total()
        reader, writer = await g.connect()
        writer.write(request(**fields).replace(b"host: x", b"host: x" + headers.encode(), 1))
        await g.until(lambda: g.dispatcher.num_live > 0 or errors.total() > before)
        g.work(turns)
        if turns >= 20:
            await reader.readuntil(b"\r\n\r\n")
        writer.close()
        await g.until(lambda: bool(self.kept.get_finished_spans()))
        (span,) = self.kept.get_finished_spans()
        self.kept.clear()
        return span


def attributes(span: ReadableSpan) -> dict[str, Any]:
    assert span.attributes is not None
    return dict(span.attributes)


def test_an_answer(tmp_path: Path) -> None:
    async def story(g: Gateway) -> None:
        span = await Traced(g).ask(model="trserve", max_tokens=6, seed=7, n=2)
        assert (span.name, span.kind) == ("text_completion trserve", SpanKind.SERVER)
        assert span.parent is None
        assert span.status.status_code is StatusCode.UNSET
        found = attributes(span)
        assert found["gen_ai.operation.name"] == "text_completion"
        assert found["gen_ai.request.model"] == "trserve"
        assert found["gen_ai.request.max_tokens"] == 6
        assert found["gen_ai.usage.input_tokens"] == 3
        assert found["gen_ai.usage.output_tokens"] == 12
        assert found["gen_ai.response.finish_reasons"] == ("length", "length")
        assert found["gen_ai.response.id"].startswith("cmpl-")
        assert found["http.response.status_code"] == 200
        assert found["trserve.router"] == "r-stitch"
        assert found["trserve.tokens.m0"] + found["trserve.tokens.m1"] == 12
        assert 0.0 <= found["trserve.share"] <= 1.0
        assert found["trserve.handoffs"] >= 0
        parts = [found[f"gen_ai.latency.time_in_{p}"] for p in ("queue", "model_prefill")]
        assert sum(parts) == pytest.approx(found["gen_ai.latency.time_to_first_token"])
        assert found["gen_ai.latency.e2e"] >= found["gen_ai.latency.time_to_first_token"] > 0
        assert span.end_time - span.start_time == pytest.approx(
            1e9 * found["gen_ai.latency.e2e"], abs=1e3
        )

    play(story, tmp_path)


def test_the_callers_span_is_its_parent(tmp_path: Path) -> None:
    async def story(g: Gateway) -> None:
        traced = Traced(g)
        header = f"\r\ntraceparent: 00-{TRACE}-{CALLER}-01"
        span = await traced.ask(headers=header)
        assert span.parent is not None
        assert f"{span.parent.trace_id:032x}" == f"{span.context.trace_id:032x}" == TRACE
        assert f"{span.parent.span_id:016x}" == CALLER
        for wrong in ("\r\ntraceparent: 00-zz-1-01", "\r\ntraceparent: "):
            assert (await traced.ask(headers=wrong)).parent is None
        unsampled = f"\r\ntraceparent: 00-{TRACE}-{CALLER}-00"
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(traced.ask(headers=unsampled), 0.3)

    play(story, tmp_path)


def test_refusals_and_clients_that_leave(tmp_path: Path) -> None:
    async def story(g: Gateway) -> None:
        traced = Traced(g)
        left = attributes(await traced.ask(turns=2, max_tokens=50, stream=True))
        assert left["gen_ai.response.finish_reasons"] == ("left",)
        assert left["gen_ai.usage.output_tokens"] < 50
        g.work(3)
        refused = await traced.ask(temperature=-1)
        assert refused.name == "POST"
        assert attributes(refused)["http.response.status_code"] == 400
        assert "gen_ai.usage.input_tokens" not in attributes(refused)
        for path in ("/health", "/metrics", "/livez"):
            await get(g, path)
        assert traced.kept.get_finished_spans() == ()
        await get(g, "/version")
        (other,) = traced.kept.get_finished_spans()
        assert (other.name, attributes(other)["url.path"]) == ("GET", "/version")

    play(story, tmp_path)


def test_whatever_a_client_says_can_be_sent_to_a_collector(tmp_path: Path) -> None:
    async def story(g: Gateway) -> None:
        traced = Traced(g)
        odd: list[dict[str, Any]] = [
            {"model": "\N{SNOWMAN}" * 500},
            {"model": "other", "seed": 2**63 - 1},
            {"seed": -(2**63)},
        ]
        for fields in odd:
            span = await traced.ask(**fields)
            assert encode_spans([span]).resource_spans
            assert len(span.name) < 300
        assert traced.gateway.service.metrics.errors == {(404, "model_not_found"): 1}

    play(story, tmp_path)


def test_nothing_is_kept_of_a_request_that_is_over(tmp_path: Path) -> None:
    async def story(g: Gateway) -> None:
        traced = Traced(g)
        _, writer = await g.connect()
        writer.write(request())
        await g.until(lambda: g.dispatcher.num_live > 0)
        g.work(20)
        await g.until(lambda: bool(traced.kept.get_finished_spans()))
        (connection,) = g.state.connections
        assert connection.visit.requests == ()  # type: ignore[union-attr]
        writer.close()

    play(story, tmp_path)


@pytest.mark.parametrize(
    ("environment", "exporter"),
    [
        ({}, None),
        ({ENDPOINT: "http://127.0.0.1:1"}, "otlp"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:1"}, "otlp"),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, "otlp"),
        ({"OTEL_TRACES_EXPORTER": "Console"}, "console"),
        ({"OTEL_TRACES_EXPORTER": "none", ENDPOINT: "http://127.0.0.1:1"}, None),
        ({"OTEL_SDK_DISABLED": "true", ENDPOINT: "http://127.0.0.1:1"}, None),
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, None),
        ({"OTEL_SERVICE_NAME": "mine"}, None),
    ],
)
def test_its_own_variables_turn_it_on(environment: dict[str, str], exporter: str | None) -> None:
    assert wanted_exporter(environment) == exporter


def test_the_service_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for environment, name in (
        ({}, "trserve"),
        ({"OTEL_SERVICE_NAME": "mine"}, "mine"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=other,a=b"}, "other"),
    ):
        with monkeypatch.context() as patch:
            for variable, value in environment.items():
                patch.setenv(variable, value)
            provider = make_provider("console", environment)
            assert provider.resource.attributes["service.name"] == name
            provider.shutdown()


def test_a_collector_that_is_away_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENDPOINT, "http://127.0.0.1:9")
    writer = span_writer({ENDPOINT: "http://127.0.0.1:9"}, "none")
    assert writer is not None
    with writer._tracer.start_as_current_span("one"):
        pass
    began = time.monotonic()
    writer.shut_down()
    assert time.monotonic() - began < 4.0


@pytest.mark.parametrize(
    ("name", "value"),
    [("OTEL_BSP_SCHEDULE_DELAY", "0"), ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "x")],
)
def test_a_variable_that_makes_no_sense_costs_the_spans_and_no_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    assert span_writer({"OTEL_TRACES_EXPORTER": "otlp"}, "none") is None
    (record,) = [each for each in caplog.records if each.name == "trserve.gateway.telemetry"]
    assert "no spans are made" in record.getMessage()


def test_off_means_that_nothing_is_imported() -> None:
    script = (
        "import sys; from trserve.gateway import app, desk, main, telemetry;"
        "assert telemetry.span_writer({}, 'none') is None;"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
