"""The OpenAPI document of the endpoint, made from one table of its routes and the bodies' types.

Says what is taken, not what it means. Knows no handlers: a test holds the table and the
application together.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final, NamedTuple

import msgspec
import orjson

from trserve import __version__
from trserve.gateway.openapi_schemas import SCHEMAS
from trserve.gateway.request_body import ChatBody, CompletionBody
from trserve.gateway.sglang import GenerateBody
from trserve.gateway.sglang_routes import AbortBody
from trserve.gateway.tokenize_routes import DetokenizeBody, TokenizeBody

_JSON: Final = "application/json"
_EVENTS: Final = "text/event-stream"
_TEXT: Final = "text/plain"
_REF: Final = "#/components/schemas/{name}"
PUBLIC: Final = frozenset(("/livez", "/readyz", "/health", "/ping"))
"""What is answered without a key, as ``access`` says."""


class Route(NamedTuple):
    """One path and method.

    ``body`` is the type of its JSON body or the name of a schema, None where it takes none;
    ``answers`` are the content types of its success; ``statuses`` those of its failures beside 401
    and 405; ``query`` and the names in braces of ``path`` are its parameters; ``answer`` names the
    schema of its success in JSON, ``refusal`` that of its 503 where it is not an error.
    """

    path: str
    method: str
    summary: str
    body: type[msgspec.Struct] | str | None = None
    answers: tuple[str, ...] = (_JSON,)
    statuses: tuple[int, ...] = ()
    query: tuple[str, ...] = ()
    answer: str = ""
    refusal: str = "Error"


_TAKES: Final = (400, 408, 413, 503)
_GENERATES: Final = (400, 404, 408, 413, 429, 500, 503, 504)
_ANSWERS: Final = (_JSON, _EVENTS)

ROUTES: Final = (
    Route(
        "/v1/chat/completions",
        "POST",
        "Answer a conversation.",
        ChatBody,
        _ANSWERS,
        _GENERATES,
        answer="ChatCompletion",
    ),
    Route(
        "/v1/completions",
        "POST",
        "Go on with a text or token ids.",
        CompletionBody,
        _ANSWERS,
        _GENERATES,
        answer="Completion",
    ),
    Route("/v1/models", "GET", "The names that are served.", answer="ModelList"),
    Route("/v1/models/{name}", "GET", "One of them.", statuses=(404,), answer="Model"),
    Route(
        "/v1/trserve/requests/{id}",
        "GET",
        "What became of the request with this response id.",
        statuses=(404,),
        answer="RequestReport",
    ),
    Route(
        "/v1/trserve/routing",
        "GET",
        "What routing is set to.",
        statuses=(403, 503),
        answer="Routing",
    ),
    Route(
        "/v1/trserve/routing",
        "POST",
        "Change it.",
        "RoutingChange",
        statuses=(400, 403, 408, 413, 503),
        answer="Routing",
    ),
    Route(
        "/v1/trserve/about",
        "GET",
        "The models, and the router's parameters.",
        statuses=(503,),
        answer="About",
    ),
    Route(
        "/v1/trserve/stats/stream",
        "GET",
        "What the server does, once a second.",
        None,
        (_EVENTS,),
        (429,),
    ),
    *(
        Route(
            "/generate",
            method,
            "SGLang's generation.",
            GenerateBody,
            _ANSWERS,
            _GENERATES,
            answer="Generated",
        )
        for method in ("POST", "PUT")
    ),
    Route("/abort_request", "POST", "End open requests.", AbortBody, statuses=(400, 408, 413)),
    Route("/flush_cache", "GET", "Empty the prefix caches.", None, (_TEXT,), (400, 503)),
    Route("/flush_cache", "POST", "Empty the prefix caches.", None, (_TEXT,), _TAKES),
    Route("/get_model_info", "GET", "The models and the tokenizer."),
    Route("/model_info", "GET", "The models and the tokenizer."),
    Route("/get_server_info", "GET", "Settings, and what the server is doing."),
    Route("/server_info", "GET", "Settings, and what the server is doing."),
    *(
        Route(
            path,
            "POST",
            "Text or a chat to ids.",
            TokenizeBody,
            statuses=(404, *_TAKES),
            answer="Tokenized",
        )
        for path in ("/tokenize", "/v1/tokenize")
    ),
    *(
        Route(
            path,
            "POST",
            "Ids to text.",
            DetokenizeBody,
            statuses=(404, *_TAKES),
            answer="Detokenized",
        )
        for path in ("/detokenize", "/v1/detokenize")
    ),
    *(
        Route(
            path,
            "GET",
            "Whether requests are taken.",
            statuses=(503,),
            query=("deep",),
            answer="Health",
            refusal="Unready",
        )
        for path in ("/health", "/readyz", "/ping")
    ),
    Route("/livez", "GET", "Whether the gateway lives.", answer="Alive"),
    Route("/health_generate", "GET", "Whether every model writes a token.", statuses=(503,)),
    Route("/metrics", "GET", "Prometheus' format.", None, (_TEXT,)),
    Route("/version", "GET", "The version.", answer="Version"),
    Route("/openapi.json", "GET", "This document."),
)


@cache
def document() -> bytes:
    """The document as JSON."""
    bodies = [route.body for route in ROUTES if isinstance(route.body, type)]
    _, schemas = msgspec.json.schema_components(dict.fromkeys(bodies), ref_template=_REF)
    paths: dict[str, Any] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return orjson.dumps(
        {
            "openapi": "3.1.0",
            "info": {"title": "trserve", "version": __version__},
            "paths": paths,
            "components": {
                "schemas": {**schemas, **SCHEMAS, "Error": _ERROR},
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            },
            "security": [{"key": []}, {}],
        }
    )


def _operation(route: Route) -> dict[str, Any]:
    statuses = {*route.statuses, 405} | (set() if route.path in PUBLIC else {401})
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": f"{route.method.lower()}{route.path.translate(_NO_SIGNS)}",
        "responses": {"200": _success(route)}
        | {str(status): _failure(route, status) for status in sorted(statuses)},
    }
    if parameters := _parameters(route):
        operation["parameters"] = parameters
    if route.body is not None:
        name = route.body if isinstance(route.body, str) else route.body.__name__
        schema = {"$ref": _REF.format(name=name)}
        operation["requestBody"] = {"required": True, "content": {_JSON: {"schema": schema}}}
    return operation


_NO_SIGNS: Final = str.maketrans({"/": "_", "{": None, "}": None, ".": "_"})


def _success(route: Route) -> dict[str, Any]:
    answer = {"$ref": _REF.format(name=route.answer)} if route.answer else {"type": "object"}
    shape = {_JSON: answer, _EVENTS: {"$ref": _REF.format(name="Event")}}
    content = {kind: {"schema": shape.get(kind, {"type": "string"})} for kind in route.answers}
    return {"description": "The answer.", "content": content}


def _failure(route: Route, status: int) -> dict[str, Any]:
    name = route.refusal if status == 503 else "Error"
    return {
        "description": "Why not.",
        "content": {_JSON: {"schema": {"$ref": _REF.format(name=name)}}},
    }


def _parameters(route: Route) -> list[dict[str, Any]]:
    named = [part[1:-1] for part in route.path.split("/") if part.startswith("{")]
    text = {"schema": {"type": "string"}}
    return [
        *({"name": name, "in": "path", "required": True, **text} for name in named),
        *({"name": name, "in": "query", **text} for name in route.query),
    ]


_ERROR: Final = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
