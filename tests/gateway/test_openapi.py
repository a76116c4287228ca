"""The OpenAPI document: valid, and about exactly the routes that there are."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.stack import new_dispatcher, new_plan
from tests.workers.fakes import world
from trserve.gateway.about import About
from trserve.gateway.app import App
from trserve.gateway.health import Health
from trserve.gateway.openapi import ROUTES, document
from trserve.gateway.routing_admin import RoutingAdmin
from trserve.gateway.service import Service
from trserve.gateway.stats import Stats
from trserve.gateway.stats_stream import Moment, StatsStream


@pytest.fixture(scope="module")
def doc() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(document())
    return found


def test_it_is_about_the_routes_that_there_are(tmp_path: Path) -> None:
    with world() as w:
        plan = new_plan(tmp_path)
        dispatcher, service = new_dispatcher(w), Service(plan, w.slab)
        health = Health(plan, w.slab, dispatcher, service.states)
        app = App(service, dispatcher, health, lambda _: (b"", b""))
        admin = RoutingAdmin(plan, service)
        about = About(service, admin.in_force, lambda: True)
        stream = StatsStream(Stats(service, w.slab, dispatcher), lambda: Moment("", "", True))
        app.add_routes(admin.table | about.table | stream.table)
        told = {(re.sub(r"\{.*", "", route.path), route.method) for route in ROUTES}
        assert told == app.routes
        assert len(told) == len(ROUTES)


def refs(value: Any) -> set[str]:
    if isinstance(value, dict):
        own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*map(refs, value.values()))
    return set().union(*map(refs, value)) if isinstance(value, list) else set()


def test_all_that_it_refers_to_is_in_it(doc: dict[str, Any]) -> None:
    schemas = doc["components"]["schemas"]
    assert refs(doc) <= {f"#/components/schemas/{name}" for name in schemas}
    assert {"ChatBody", "CompletionBody", "GenerateBody", "Error"} <= set(schemas)
    assert "max_completion_tokens" in schemas["ChatBody"]["properties"]
    forms = [
        "response_format",
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
    ]
    forms += ["guided_grammar", "regex", "json_schema", "ebnf"]
    for name, members in (
        ("ChatBody", [*forms, "tool_choice"]),
        ("CompletionBody", forms),
        ("SamplingBody", ["regex", "json_schema", "ebnf"]),
    ):
        told = schemas[name]["properties"]
        assert all(told[member]["description"] for member in members)


def test_each_operation_is_whole(doc: dict[str, Any]) -> None:
    ids = []
    for path, methods in doc["paths"].items():
        for operation in methods.values():
            ids.append(operation["operationId"])
            assert {"200", "405"} <= set(operation["responses"])
            named = {p["name"] for p in operation.get("parameters", ()) if p["in"] == "path"}
            assert named == set(re.findall(r"\{(\w+)\}", path))
    assert len(ids) == len(set(ids))
