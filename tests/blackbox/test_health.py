"""Liveness, readiness and the ready line, as probes and scripts see them."""

from __future__ import annotations

import re

import pytest

from tests.serverproc import concurrently


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/health"])
def test_probes_say_yes(server, path):
    assert server.request("GET", path, timeout_s=5.0).status == 200


def test_probes_answer_under_load(server):
    body = {"model": "trserve", "prompt": [5] * 20, "max_tokens": 150, "temperature": 0}
    own = {"trserve": {"only": server.models[0]}, "ignore_eos": True}

    def work(index: int) -> int:
        if index % 4:
            return server.request("GET", "/health", timeout_s=5.0).status
        return 200 if server.post("/v1/completions", body | own)["choices"] else 0

    assert set(concurrently(work, range(32), 8)) == {200}


def test_standard_output_has_the_ready_line_alone(server):
    assert server.stdout == [server.ready_line]
    pattern = r"trserve ready http://\S+:\d+ models=\S+,\S+ router=\S+ device=\S+\n"
    assert re.fullmatch(pattern, server.ready_line)
    assert server.device == "cpu"
    assert server.router == "r-stitch"
    assert len(set(server.models)) == 2


def test_one_process_per_model_beside_gateway_and_launcher(server):
    assert len(server.children()) >= len(server.models) + 1


def test_responses_carry_a_request_id(server):
    sent = {"x-request-id": "probe-17"}
    body = {"model": "trserve", "prompt": [5, 6], "max_tokens": 2, "temperature": 0}
    response = server.request("POST", "/v1/completions", body, headers=sent)
    assert response.headers["x-request-id"] == "probe-17"
    assert server.request("POST", "/v1/completions", body).headers["x-request-id"]
