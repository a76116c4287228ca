"""What answers look like, and the bodies that no type describes, as JSON schemas.

Members that are always there are required; a client may find more. Knows no routes and makes no
answer: tests hold these schemas against what the endpoint sends.
"""

from __future__ import annotations

from typing import Any, Final

Schema = dict[str, Any]

_TEXT: Final[Schema] = {"type": "string"}
_TEXT_OR_NULL: Final[Schema] = {"type": ["string", "null"]}
_COUNT: Final[Schema] = {"type": "integer", "minimum": 0}
_NUMBER: Final[Schema] = {"type": "number"}
_FINITE: Final[Schema] = {"type": ["number", "null"]}
_FLAG: Final[Schema] = {"type": "boolean"}
_ANY: Final[Schema] = {}
_OBJECT: Final[Schema] = {"type": "object"}


def _exactly(value: str) -> Schema:
    return {"type": "string", "const": value}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _one_or_list(items: Schema) -> Schema:
    return {"anyOf": [items, _list(items)]}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _map(values: Schema) -> Schema:
    return {"type": "object", "additionalProperties": values}


def _object(optional: Schema | None = None, /, **required: Schema) -> Schema:
    """An object with these members; of what is not named here it may have more."""
    properties = {**required, **(optional or {})}
    return {"type": "object", "required": sorted(required), "properties": properties}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


_OWN: Final = _object(
    {"seeds": _list({"type": "integer"})},
    tokens=_map(_COUNT),
    handoffs=_COUNT,
    share={"type": "number", "minimum": 0, "maximum": 1},
    pending_ms=_NUMBER,
    degraded=_FLAG,
    seed={"type": "integer"},
)
_USAGE: Final = _object(
    {"trserve": _OWN},
    prompt_tokens=_COUNT,
    completion_tokens=_COUNT,
    total_tokens=_COUNT,
    prompt_tokens_details=_object(cached_tokens=_COUNT),
)
_TRACE: Final = _object(
    {"score": _list({"type": ["number", "null"]})},
    models=_list(_TEXT),
    source=_list(_COUNT),
    alone=_list(_FLAG),
    handoff_us=_list({"type": ["integer", "null"], "minimum": 0}),
)
_REASON: Final[Schema] = {"enum": ["stop", "length", "tool_calls", "abort"]}
_CAUSE: Final[Schema] = {"type": ["string", "integer", "null"]}
_EXTRAS: Final[Schema] = {
    "stop_reason": _CAUSE,
    "matched_stop": _CAUSE,
    "token_ids": _list(_COUNT),
    "trserve": _TRACE,
}
_MESSAGE: Final = _object(
    {"tool_calls": _list(_OBJECT), "reasoning_content": _TEXT_OR_NULL},
    role=_exactly("assistant"),
    content=_TEXT_OR_NULL,
    refusal={"type": "null"},
)
_THRESHOLDS: Final[Schema] = _list({"type": "integer", "minimum": 1})
_MODEL: Final = _object(
    id=_TEXT,
    object=_exactly("model"),
    created=_COUNT,
    owned_by=_TEXT,
    max_model_len=_COUNT,
)
_GENERATED: Final = _object(
    text=_TEXT,
    output_ids=_list(_COUNT),
    meta_info=_object(id=_TEXT, finish_reason=_or_null(_object(type=_TEXT))),
)
_HEALTH: Final = _object(
    status={"enum": ["ok", "degraded", "unavailable"]},
    detail=_TEXT,
    requests=_map(_COUNT),
    models=_list(_object(name=_TEXT)),
)


def _completion(kind: str, **content: Schema) -> Schema:
    choice = _object(
        _EXTRAS, index=_COUNT, finish_reason=_REASON, logprobs=_or_null(_OBJECT), **content
    )
    return _object(
        id=_TEXT,
        object=_exactly(kind),
        created=_COUNT,
        model=_TEXT,
        choices=_list(choice),
        usage=_ref("Usage"),
    )


SCHEMAS: Final[dict[str, Schema]] = {
    "Usage": _USAGE,
    "ChatCompletion": _completion("chat.completion", message=_MESSAGE),
    "Completion": _completion("text_completion", text=_TEXT),
    "Model": _MODEL,
    "ModelList": _object(object=_exactly("list"), data=_list(_ref("Model"))),
    "RequestReport": _object(
        id=_TEXT,
        object=_exactly("trserve.request"),
        model=_TEXT_OR_NULL,
        created=_COUNT,
        status={"enum": ["running", "finished", "failed", "cancelled"]},
        finish_reasons=_list(_TEXT_OR_NULL),
        usage=_or_null(_ref("Usage")),
    ),
    "Routing": _object(
        router=_object(
            name=_TEXT,
            parameters=_map(
                _object(
                    value={"type": ["number", "null"]},
                    started_with={"type": ["number", "null"]},
                    help=_TEXT,
                )
            ),
        ),
        batch_threshold=_object(
            source={"enum": ["admin", "auto", "start"]},
            models=_list(_TEXT),
            rows=_map(_THRESHOLDS),
        ),
    ),
    "About": _object(
        version=_TEXT,
        served_models=_list(_TEXT),
        device=_TEXT,
        max_model_len=_COUNT,
        models=_list(_object(name=_TEXT, status=_TEXT, active_parameters=_COUNT)),
        router=_object(
            name=_TEXT,
            known=_FLAG,
            parameters=_list(
                _object(
                    name=_TEXT,
                    help=_TEXT,
                    value=_FINITE,
                    minimum=_FINITE,
                    maximum=_FINITE,
                )
            ),
        ),
        routing_can_be_changed=_FLAG,
    ),
    "Event": {
        **_object(data=_TEXT),
        "description": "One event of a stream: its data is the JSON of a chunk, or [DONE].",
    },
    "Generated": _one_or_list(_GENERATED),
    "Tokenized": _object(
        {"token_strs": _list(_ANY)},
        count=_one_or_list(_COUNT),
        max_model_len=_COUNT,
        tokens=_list({"anyOf": [_COUNT, _list(_COUNT)]}),
    ),
    "Detokenized": _object(prompt=_one_or_list(_TEXT), text=_one_or_list(_TEXT)),
    "Health": _HEALTH,
    "Unready": {"anyOf": [_HEALTH, _ref("Error")]},
    "RoutingChange": {
        "type": "object",
        "minProperties": 1,
        "additionalProperties": False,
        "properties": {
            "router": _map({"type": ["number", "null"]}),
            "batch_threshold": {
                "anyOf": [{"const": "auto"}, _THRESHOLDS, {**_map(_THRESHOLDS), "minProperties": 1}]
            },
        },
    },
    "Alive": _object(status=_exactly("ok")),
    "Version": _object(version=_TEXT),
}
"""By name: what ``components.schemas`` holds beside the types of bodies."""
