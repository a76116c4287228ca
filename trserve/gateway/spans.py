"""One OpenTelemetry span for each request that asks for an answer, made when it is over.

Names are those of the semantic conventions for generative AI, of vLLM for times within a request,
and ``trserve.`` for what routing did. A prompt, an answer and a key are never in it. Spans are
exported by a thread of the SDK's; nothing is done for a single token. Knows no HTTP.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from threading import Thread
from typing import Final

from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from trserve import __version__
from trserve.gateway.access import METRICS, PROBES
from trserve.gateway.requests import GenerationRequest
from trserve.gateway.visit import CLIENT_LEFT, Visit

Attributes = Iterator[tuple[str, AttributeValue]]
_PARENT: Final = (b"traceparent", b"tracestate")
_NAME: Final = "trserve"
_SERVER_ERROR: Final = 500
_OPERATIONS: Final = {"chat": "chat", "completion": "text_completion"}
_FLUSH_S: Final = 2.0
_LONGEST: Final = 200
_propagator: Final = TraceContextTextMapPropagator()


def make_provider(exporter: str, environment: Mapping[str, str]) -> TracerProvider:
    """A provider whose spans go to ``otlp`` or ``console``; the rest its own variables say.

    Raises:
        ImportError: the exporter's package is not installed.
    """
    # What the user said of the service wins over ours.
    own = {SERVICE_NAME: _NAME, SERVICE_VERSION: __version__}
    provider = TracerProvider(
        resource=Resource(own).merge(_said(environment)), shutdown_on_exit=False
    )
    provider.add_span_processor(BatchSpanProcessor(_exporter(exporter, environment)))
    return provider


def _said(environment: Mapping[str, str]) -> Resource:
    found = Resource.create()
    named = environment.get("OTEL_SERVICE_NAME") or SERVICE_NAME in environment.get(
        "OTEL_RESOURCE_ATTRIBUTES", ""
    )
    # Without a name the SDK calls every service unknown.
    kept = {k: v for k, v in found.attributes.items() if named or k != SERVICE_NAME}
    return Resource(kept)


def _exporter(name: str, environment: Mapping[str, str]) -> SpanExporter:
    if name == "console":
        import sys

        return ConsoleSpanExporter(out=sys.stderr)
    protocol = environment.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environment.get(
        "OTEL_EXPORTER_OTLP_PROTOCOL", ""
    )
    if protocol.strip().lower() == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc

        return Grpc()  # type: ignore[no-any-return]
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter()


class SpanWriter:
    """Makes the spans of one gateway.

    Args:
        provider: where they go.
        router: the name of the server's router.
    """

    def __init__(self, provider: TracerProvider, router: str) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer(_NAME, __version__)
        self._router = router

    def close(self, visit: Visit) -> None:
        """The visit is over: make its span, unless it was a probe or a scrape."""
        path = visit.scope["path"]
        if path in PROBES or path == METRICS:
            return
        request = visit.requests[0] if visit.requests else None
        now_s, now_ns = time.monotonic(), time.time_ns()
        span = self._tracer.start_span(
            _span_name(visit, request),
            context=_parent(visit),
            kind=SpanKind.SERVER,
            attributes=dict(self._attributes(visit, request, now_s)),
            start_time=now_ns - int((now_s - visit.arrived_s) * 1e9),
        )
        if (visit.status or CLIENT_LEFT) >= _SERVER_ERROR or "error" in visit.reasons:
            span.set_status(Status(StatusCode.ERROR))
        span.end(now_ns)

    def shut_down(self) -> None:
        """Send what is left, within two seconds; a collector that is away holds nobody up."""
        flush = Thread(target=self._provider.shutdown, daemon=True)
        flush.start()
        flush.join(_FLUSH_S)

    def _attributes(
        self, visit: Visit, request: GenerationRequest | None, now_s: float
    ) -> Attributes:
        yield from _http(visit)
        if request is not None:
            yield from _asked(request)
            yield "trserve.router", self._router
            yield "gen_ai.latency.e2e", now_s - visit.arrived_s
        if visit.usages:
            yield "gen_ai.response.id", visit.response_id
            yield "gen_ai.response.finish_reasons", visit.reasons
            yield from _answered(visit)
            yield from _times(visit)


def _span_name(visit: Visit, request: GenerationRequest | None) -> str:
    """As the conventions have it; the method of what asked for no answer, or was not understood.

    A model's name is in it only once the model wrote: names of spans are to be few.
    """
    if request is None:
        return str(visit.scope["method"])
    operation = _OPERATIONS[request.kind]
    return f"{operation} {_text(request.model_as_sent or _NAME)}" if visit.usages else operation


def _text(value: str) -> str:
    """``value`` as an exporter can send it: not too long, and UTF-8."""
    return value[:_LONGEST].encode("utf-8", "replace").decode()


def _parent(visit: Visit) -> Context:
    """The caller's span, if it named one; a root of its own otherwise."""
    carrier = {
        name.decode(): value.decode("latin-1")
        for name, value in visit.scope["headers"]
        if name in _PARENT
    }
    return _propagator.extract(carrier, Context())


def _http(visit: Visit) -> Attributes:
    scope = visit.scope
    status = CLIENT_LEFT if visit.status is None else visit.status
    yield "http.request.method", scope["method"]
    yield "url.path", _text(scope["path"])
    yield "http.response.status_code", status
    yield "trserve.request_id", visit.request_id.decode()
    if client := scope.get("client"):
        yield "client.address", client[0]
    if status >= _SERVER_ERROR:
        yield "error.type", str(status)


def _asked(request: GenerationRequest) -> Attributes:
    yield "gen_ai.operation.name", _OPERATIONS[request.kind]
    yield "gen_ai.provider.name", _NAME
    yield "gen_ai.request.model", _text(request.model_as_sent or _NAME)
    yield "gen_ai.request.temperature", request.temperature
    yield "gen_ai.request.top_p", request.top_p
    yield "gen_ai.request.choice.count", request.n
    if request.max_tokens is not None:
        yield "gen_ai.request.max_tokens", request.max_tokens
    if request.seed is not None:
        yield "gen_ai.request.seed", request.seed


def _answered(visit: Visit) -> Attributes:
    own = [usage["trserve"] for usage in visit.usages]
    written = sum(usage["completion_tokens"] for usage in visit.usages)
    tokens: Counter[str] = Counter()
    for each in own:
        tokens.update(each["tokens"])
    first = next(iter(own[0]["tokens"]))
    yield "gen_ai.usage.input_tokens", visit.prompt_tokens
    yield "gen_ai.usage.output_tokens", written
    for name, count in tokens.items():
        yield f"trserve.tokens.{name}", count
    yield "trserve.handoffs", sum(each["handoffs"] for each in own)
    yield "trserve.share", 1.0 - tokens[first] / written if written else 0.0
    yield "trserve.pending_ms", sum(each["pending_ms"] for each in own)
    yield "trserve.degraded", any(each["degraded"] for each in own)
    yield "trserve.seed", str(own[0]["seed"])


def _times(visit: Visit) -> Attributes:
    """Of the answer that began first."""
    times = [each for each in visit.times if each is not None and each.first_s]
    if not times:
        return
    first = min(times, key=lambda each: each.first_s)
    yield "gen_ai.latency.time_in_queue", first.admitted_s - first.arrived_s
    yield "gen_ai.latency.time_in_model_prefill", first.first_s - first.admitted_s
    yield "gen_ai.latency.time_to_first_token", first.first_s - first.arrived_s
    yield "gen_ai.latency.time_in_model_decode", first.ended_s - first.first_s
