"""What a routed token costs that can be counted: no serialization, one bell a step and consumer."""

from __future__ import annotations

import os
from pathlib import Path

from tests.blackbox.watched_router import DIRECTORY, read_reports
from tests.serverproc import Server, concurrently

CONCURRENCY = 24
TOKENS = 24


def body(number: int) -> dict[str, object]:
    """Greedy or sampled with all that parameters can say; most tokens are handed over twice."""
    common = {
        "model": "trserve",
        "prompt": [5 + number % 40, 6, 7 + number // 40 % 40],
        "max_tokens": TOKENS,
        "ignore_eos": True,
    }
    if number % 2:
        return common | {"temperature": 0.8, "seed": number, "frequency_penalty": 0.1}
    return common | {"temperature": 0}


def watched(router: str, reports: Path) -> Server:
    """A server whose workers report to ``reports``; nobody sends them thresholds meanwhile."""
    # They import the router from where this test runs, whatever else is on their path.
    path = os.pathsep.join(filter(None, (os.getcwd(), os.environ.get("PYTHONPATH"))))
    env = {DIRECTORY: str(reports), "PYTHONPATH": path}
    name = f"tests.blackbox.watched_router:{router}"
    args = ["--device", "cpu", "--router", name, "--batch-threshold", "1,1"]
    return Server(args, env=env)


def test_nothing_is_serialized_after_first_contact_and_bells_ring_once_a_step(full, tmp_path: Path):
    requests = 1_000 if full else 200
    with watched("Watched", tmp_path) as server:
        answers = concurrently(
            lambda number: server.post("/v1/completions", body(number)),
            range(requests),
            CONCURRENCY,
        )
        reports = read_reports(tmp_path)  # before the stop, which is a message of the launcher's
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [TOKENS] * requests
    written = [answer["usage"]["trserve"]["tokens"] for answer in answers]
    assert all(all(tokens.values()) for tokens in written), "some were not routed"
    assert len(reports) == 2
    for seen in reports:
        assert seen.serialized == 0
        assert seen.first_contacts == requests
        assert seen.routed_rows >= requests * TOKENS // 6
        assert seen.bells > requests
        assert seen.most_bells == 1


def test_the_traps_catch_what_they_are_set_for(tmp_path: Path):
    """A worker whose router serializes: the trap is counted, and the request ends with an error."""
    with watched("Serializing", tmp_path) as server:
        answer = server.request("POST", "/v1/completions", body(0))
        assert "router" in answer.body.decode()
        assert sum(seen.serialized for seen in read_reports(tmp_path)) > 0
