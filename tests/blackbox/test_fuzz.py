"""Generated bad requests to every route: none fails inside the server, and it goes on answering.

The routes and the names of members are those of the server's own OpenAPI document.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.serverproc import Server

FULL = bool(os.environ.get("TRSERVE_FULL"))
CASES = 2000 if FULL else 300
RAW_CASES = 200 if FULL else 30
GOOD_EVERY = 100
FAILED = {500, 502, 504}

ODD = st.sampled_from(
    [
        *(None, True, False, 0, -1, 1, 2, 20, 21, 1.5, 5_000_000, 2**31, 2**63, 2**64, 10**400),
        *(1e-30, 1e308, -0.0, float("nan"), float("inf"), "", "x", "1", "\x00", "\ud800", "😀"),
        *(
            "user",
            "auto",
            "none",
            "trserve",
            "tiny",
            "trserve:threshold=0.3",
            "x:y=nan",
            "a" * 5000,
        ),
        *([], {}, [[]], [""], [None], [1, "x"], [[1], "x"], [[1], [2]], [-1], [2**31], [5, 6]),
        {"type": "text"},
        {"type": "json_object"},
        {"include_usage": True, "continuous_usage_stats": True},
        {"trace": True, "router": {"tau": 0.1}},
        {"only": "small", "timeout_s": 1e-9},
        {"5": 100, "x": 1},
        [{"role": "user", "content": "What is 1 + 1?"}],
        [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url"}]}],
        [{"role": "USER", "content": 1}],
        [{"role": "tool", "content": None, "tool_calls": [1]}],
        [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        {"max_new_tokens": 3, "n": 2, "temperature": 0},
    ]
)
JSON = ODD | st.recursive(
    ODD,
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=3), x, max_size=3),
    max_leaves=5,
)
RAW = st.binary(max_size=60) | st.sampled_from(
    [
        *(b"", b" ", b"null", b"[]", b"{", b'{"prompt":}', b"\xff\xfe{}", b"\xef\xbb\xbf{}"),
        *(b"[" * 10_000, b'{"a":' * 10_000, b'{"prompt": "\\ud800", "max_tokens": 1}'),
        b'{"prompt": "x", "prompt": [1], "max_tokens": 1, "max_tokens": 2}',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "\xc3\x28"}',
        b"prompt=x&max_tokens=1",
    ]
)


@pytest.fixture(scope="module")
def document(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = server.request("GET", "/openapi.json").json()
    return found


def bodies(document: dict[str, Any], operation: dict[str, Any]) -> st.SearchStrategy[bytes]:
    """Objects of the members that the operation takes, with values that it may not take."""
    content = operation.get("requestBody")
    if content is None:
        return RAW | JSON.map(encoded)
    reference = content["content"]["application/json"]["schema"]["$ref"]
    schema = document["components"]["schemas"][reference.rpartition("/")[2]]
    names = sorted(schema["properties"])
    few = {"max_tokens": 3, "max_completion_tokens": 3}  # answers are not what is tested
    good = [
        {"prompt": [5, 6]},
        {"prompt": "x"},
        {"messages": [{"role": "user", "content": "x"}]},
        {"text": "x"},
        {"input_ids": [5, 6]},
        {"tokens": [5, 6]},
    ]
    base = st.sampled_from([{}, *({k: v for k, v in g.items() if k in names} for g in good)])
    odd = st.dictionaries(st.sampled_from(names), JSON, max_size=4)
    return RAW | st.builds(lambda g, o: encoded({**few, **g, **o}), base, odd)


def encoded(value: Any) -> bytes:
    return json.dumps(value).encode("utf-8", "surrogatepass")


def cases(document: dict[str, Any]) -> st.SearchStrategy[tuple[str, str, bytes]]:
    """A method, a path with its query, and a body."""
    operations = [
        (method.upper(), path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
        if path != "/v1/trserve/stats/stream"  # its answer has no end to wait for
    ]
    # Those that take a body have more to get wrong.
    weighted = [op for op in operations for _ in range(4 if "requestBody" in op[2] else 1)]
    text = st.text(max_size=8).map(lambda t: quote(t.encode("utf-8", "surrogatepass"), safe=""))
    methods = st.sampled_from(["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE"])

    def of(operation: tuple[str, str, dict[str, Any]]) -> st.SearchStrategy[tuple[str, str, bytes]]:
        own, path, described = operation
        method = st.integers(0, 9).flatmap(lambda n: methods if n == 0 else st.just(own))
        paths = text.map(lambda t: path.replace("{name}", t).replace("{id}", t))
        whole = st.builds(lambda p, q: p + q, paths, st.sampled_from(["", "?deep=1", "?x=%00&%"]))
        return st.tuples(method, whole, bodies(document, described))

    return st.sampled_from(weighted).flatmap(of)


def check_good(server: Server) -> None:
    reply = server.post(
        "/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 3, "temperature": 0}, timeout_s=20.0
    )
    assert reply["usage"]["completion_tokens"] > 0


SETTINGS = settings(
    deadline=None,
    database=None,
    derandomize=not FULL,
    suppress_health_check=list(HealthCheck),
)


def test_no_request_fails_inside_the_server(server: Server, document: dict[str, Any]) -> None:
    seen: dict[int, int] = {}

    @settings(SETTINGS, max_examples=CASES)
    @given(cases(document))
    def run(case: tuple[str, str, bytes]) -> None:
        method, path, body = case
        response = server.request(method, path, body, timeout_s=30.0)
        assert response.status not in FAILED | {503}, response.body[:500]
        if response.status >= 400 and method != "HEAD":
            assert response.json()["error"]["message"]
        seen[response.status] = seen.get(response.status, 0) + 1
        if sum(seen.values()) % GOOD_EVERY == 0:
            check_good(server)

    run()
    print(f"{sum(seen.values())} requests by status: {dict(sorted(seen.items()))}")
    assert sum(seen.values()) >= CASES
    assert seen[200] >= CASES // 10 and seen[400] >= CASES // 5  # both kinds are generated
    check_good(server)


HEAD = st.sampled_from(
    [
        b"POST /v1/completions HTTP/1.1\r\n",
        b"GET /health HTTP/1.1\r\n",
        b"GET / HTTP/9.9\r\n",
        b"GET  / HTTP/1.1\r\n",
        b"\x16\x03\x01\r\n",
        b"PRI * HTTP/2.0\r\n",
    ]
)
LINES = st.lists(
    st.sampled_from(
        [
            b"host: x",
            b"content-length: 5",
            b"content-length: -1",
            b"content-length: 99999999999999999999",
            b"content-length: 5, 6",
            b"transfer-encoding: chunked",
            b"transfer-encoding: xchunked",
            b"expect: 100-continue",
            b"connection: close",
            b"bad header",
            b" folded",
            b"x: \xff\x00",
            b"content-type: \x7f",
            b"authorization: Bearer",
        ]
    ),
    max_size=5,
)
TAIL = st.sampled_from(
    [b"", b"hello", b"5\r\nhello\r\n0\r\n\r\n", b"ffffffffffffffffff\r\n", b"\0"]
)


def test_no_bytes_fail_inside_the_server(server: Server) -> None:
    address = urlsplit(server.url)

    @settings(SETTINGS, max_examples=RAW_CASES)
    @given(HEAD, LINES, TAIL)
    def run(head: bytes, lines: list[bytes], tail: bytes) -> None:
        with socket.create_connection((address.hostname, address.port), timeout=20.0) as client:
            client.sendall(head + b"".join(line + b"\r\n" for line in lines) + b"\r\n" + tail)
            client.shutdown(socket.SHUT_WR)
            answer = b""
            with contextlib.suppress(ConnectionResetError):  # a refusal, too
                while data := client.recv(65536):
                    answer += data
        status = [int(part[9:12]) for part in answer.split(b"\r\n") if part.startswith(b"HTTP/1.1")]
        assert not FAILED & set(status), answer[:500]

    run()
    check_good(server)
