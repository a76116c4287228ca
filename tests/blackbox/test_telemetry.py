"""A server that is told of a collector by OpenTelemetry's variables sends it a span a request."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.serverproc import Server, wait_until

TRACE = "0af7651916cd43dd8448eb211c80319c"


@contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    """A collector's address, and the spans that it was sent."""
    spans: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                service = {a.key: a.value.string_value for a in resource.resource.attributes}
                assert service["service.name"] == "trserve"
                spans.extend(span for scope in resource.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", spans
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


def test_spans_reach_a_collector_and_the_last_ones_too():
    chat = {"messages": [{"role": "user", "content": "What is 20 + 30?"}], "max_tokens": 20}
    with collector() as (address, spans):
        env = {"OTEL_EXPORTER_OTLP_ENDPOINT": address, "OTEL_BSP_SCHEDULE_DELAY": "200"}
        with Server(["--device", "cpu"], env=env) as server:
            parent = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
            answer = server.request("POST", "/v1/chat/completions", chat, parent)
            assert answer.status == 200
            (span,) = wait_until(lambda: spans[:1], bool, 10.0)
            assert span.trace_id.hex() == TRACE
            assert span.name == "chat trserve"
            told = {a.key: a.value for a in span.attributes}
            usage = answer.json()["usage"]
            assert told["gen_ai.usage.output_tokens"].int_value == usage["completion_tokens"]
            assert told["gen_ai.response.id"].string_value == answer.json()["id"]
            for name, count in usage["trserve"]["tokens"].items():
                assert told[f"trserve.tokens.{name}"].int_value == count
            list(server.stream("/v1/chat/completions", chat))
            assert server.stop() == 0
        assert len(spans) == 2, "what was not sent yet is sent at the end"
