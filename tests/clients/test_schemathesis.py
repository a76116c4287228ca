"""schemathesis against the endpoint's own OpenAPI document: bodies as it says, and broken ones.

That every body is accepted that the document allows is not asked for: it tells types, while ranges
depend on the model (ids, context, slots), and beyond them the endpoint says 400. Bodies within
the ranges are drawn here, and must be answered.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.specs.openapi import checks

from tests.clients.conftest import ADMIN_KEY
from tests.conftest import FULL

EXAMPLES = 100 if FULL else 8
"""Of each mode, for each operation that takes a body or a parameter."""

CHECKS = [
    schemathesis.checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
    checks.allow_header_conformance,
]
KEY = {"Authorization": f"Bearer {ADMIN_KEY}"}
TIMEOUT_S = 30
ENDLESS = ("GET /v1/trserve/stats/stream",)
"""Their answers have no end that a client could wait for."""

drawn = settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def operations(server) -> dict[str, Any]:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    found = [each.ok() for each in schema.get_all_operations()]
    return {each.label: each for each in found if each.label not in ENDLESS}


def send(case: Case) -> int:
    """The status of the answer, which must be as documented."""
    answer = case.call(headers=KEY, timeout=TIMEOUT_S)
    case.validate_response(answer, checks=CHECKS)
    return answer.status_code


def send_all(cases: st.SearchStrategy[Case], examples: int) -> int:
    """Send that many; returns how many there were."""
    statuses = []

    @settings(drawn, max_examples=examples)
    @given(case=cases)
    def one(case):
        statuses.append(send(case))

    one()
    return len(statuses)


def test_whatever_is_sent_the_answer_is_as_documented(operations, server):
    sent: Counter[str] = Counter()
    for label, operation in operations.items():
        takes = bool(operation.body) or bool(operation.path_parameters)
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            if mode is GenerationMode.NEGATIVE and not operation.body:
                continue  # it takes nothing that could be wrong
            cases = operation.as_strategy(generation_mode=mode)
            sent[f"{label} {mode.value}"] = send_all(cases, EXAMPLES if takes else 1)
    assert len(sent) > len(operations) + 8
    assert sum(sent.values()) > (2_000 if FULL else 100), sent
    assert server.request("GET", "/health").status == 200


NUMBERS = {
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0.1, 1),
    "top_k": st.integers(-1, 50).filter(bool),
    "min_p": st.floats(0, 1),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.5, 2),
    "n": st.integers(1, 3),
}
MEMBERS = NUMBERS | {
    "stream": st.booleans(),
    "stop": st.lists(st.text(min_size=1, max_size=3), max_size=3),
    "ignore_eos": st.booleans(),
    "logit_bias": st.dictionaries(st.integers(0, 200).map(str), st.floats(-9, 9), max_size=3),
    "return_token_ids": st.booleans(),
    "trserve": st.fixed_dictionaries({}, optional={"trace": st.booleans()}),
    "user": st.text(),
    "metadata": st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2),
}
TEXTS = st.text(max_size=20)
CONTENT = TEXTS | st.lists(
    st.fixed_dictionaries({"type": st.just("text"), "text": TEXTS}), min_size=1, max_size=2
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant"]), "content": CONTENT}
    ),
    min_size=1,
    max_size=3,
)
COUNT = st.integers(1, 6)
BODIES = {
    "POST /v1/chat/completions": st.fixed_dictionaries(
        {"messages": MESSAGES, "max_completion_tokens": COUNT},
        optional=MEMBERS | {"logprobs": st.booleans(), "stream_options": st.none()},
    ),
    "POST /v1/completions": st.fixed_dictionaries(
        {"prompt": st.text(min_size=1, max_size=20), "max_tokens": COUNT},
        optional=MEMBERS | {"logprobs": st.integers(0, 5), "echo": st.booleans()},
    ),
    "POST /generate": st.fixed_dictionaries(
        {
            "input_ids": st.lists(st.integers(0, 200), min_size=1, max_size=9),
            "sampling_params": st.fixed_dictionaries({"max_new_tokens": COUNT}),
        },
        optional={"stream": st.booleans(), "return_logprob": st.booleans()},
    ),
    "POST /tokenize": st.fixed_dictionaries({"prompt": TEXTS | st.lists(TEXTS, min_size=1)}),
    "POST /detokenize": st.fixed_dictionaries({"tokens": st.lists(st.integers(0, 200))}),
}


@pytest.mark.parametrize("label", BODIES)
def test_what_is_in_range_is_answered(operations, label):
    @drawn
    @given(body=BODIES[label])
    def one(body):
        assert send(operations[label].Case(body=body, media_type="application/json")) == 200

    one()


def test_methods_that_no_route_has_are_refused(operations, server):
    for path in {operation.path.partition("{")[0] for operation in operations.values()}:
        answer = server.request("TRACE", path, headers=KEY)
        assert answer.status == 405, path
        assert set(answer.headers["allow"].split(", ")) <= {"GET", "POST", "PUT"}
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
