"""Response bodies and stream events, as bytes.

All JSON that OpenAI's clients read is made here. What is constant in a stream is encoded once, so
that a token costs one JSON string and one join. Knows nothing of sockets, tokens or models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
import orjson

from trserve.errors import RequestError

Kind = Literal["chat", "completion"]
FinishReason = Literal["stop", "length", "tool_calls", "abort", "error"]

DONE = b"data: [DONE]\n\n"

_CHUNK_OBJECTS = {"chat": "chat.completion.chunk", "completion": "text_completion"}

_json_string = msgspec.json.Encoder().encode


class StreamFormat:
    """The events of one choice in a stream.

    Args:
        kind: which of the two routes.
        response_id: ``chatcmpl-...`` or ``cmpl-...``.
        created: Unix time in seconds.
        model: the name that the client used.
        index: which of the choices this is the stream of.
        include_usage: each chunk has ``usage: null`` and one more with the usage follows the last,
            as OpenAI does; otherwise the key is absent.
    """

    DONE = DONE

    __slots__ = ("_choice", "_close", "_end", "_envelope", "_first", "_last", "_next", "_tail")

    def __init__(
        self,
        *,
        kind: Kind,
        response_id: str,
        created: int,
        model: str,
        include_usage: bool,
        index: int = 0,
    ) -> None:
        envelope = orjson.dumps(
            {
                "id": response_id,
                "object": _CHUNK_OBJECTS[kind],
                "created": created,
                "model": model,
            }
        )
        self._envelope = b"data: " + envelope[:-1]
        self._choice = choice = self._envelope + b',"choices":[{"index":%d,' % index
        if kind == "chat":
            self._first = choice + b'"delta":{"role":"assistant","content":'
            self._next = choice + b'"delta":{"content":'
            self._last = choice + b'"delta":{}'
            self._close = b"}"
        else:
            self._first = self._next = choice + b'"text":'
            self._last = choice + b'"text":""'
            self._close = b""
        self._end = b'}],"usage":null}\n\n' if include_usage else b"}]}\n\n"
        self._tail = self._close + b',"logprobs":null,"finish_reason":null' + self._end

    def delta(
        self,
        text: str,
        *,
        first: bool,
        finish_reason: FinishReason | None = None,
        stop_reason: str | int | None = None,
        extra: bytes | None = None,
        logprobs: bytes = b"null",
        usage: Mapping[str, Any] | None = None,
    ) -> bytes:
        """One event with ``text``.

        Args:
            text: what is new; may be empty in the last event.
            first: whether nothing was sent yet: the role of a chat goes out with its first text.
            finish_reason: given in the last event.
            stop_reason: the stop string or id that ended the text.
            extra: JSON members to add to the choice, already encoded, without a leading comma.
            logprobs: JSON of the choice's member of this name.
            usage: with ``continuous_usage_stats``, the usage so far.
        """
        head = self._first if first else self._next
        if finish_reason is None and extra is None and usage is None and logprobs == b"null":
            return b"".join((head, _json_string(text), self._tail))
        if finish_reason is not None and not text and not first:
            body = self._last
        else:
            body = head + _json_string(text) + self._close
        members = _end_members(logprobs, finish_reason, stop_reason, extra)
        return body + members + self._end_with(usage)

    def text(self, text: str) -> bytes:
        """:meth:`delta` of an event with nothing but text, which is not the first."""
        return b"".join((self._next, _json_string(text), self._tail))

    def message(
        self,
        delta: Mapping[str, Any],
        *,
        finish_reason: FinishReason | None = None,
        stop_reason: str | int | None = None,
        extra: bytes | None = None,
        logprobs: bytes = b"null",
        usage: Mapping[str, Any] | None = None,
    ) -> bytes:
        """One event of a chat with any ``delta``; the others as in :meth:`delta`."""
        members = _end_members(logprobs, finish_reason, stop_reason, extra)
        body = self._choice + b'"delta":' + orjson.dumps(delta)
        return body + members + self._end_with(usage)

    def _end_with(self, usage: Mapping[str, Any] | None) -> bytes:
        return self._end if usage is None else b'}],"usage":' + orjson.dumps(usage) + b"}\n\n"

    def usage(self, usage: Mapping[str, Any]) -> bytes:
        """The event after the last with ``include_usage``: usage, and no choice."""
        return self._envelope + b',"choices":[],"usage":' + orjson.dumps(usage) + b"}\n\n"

    def error(self, error: RequestError) -> bytes:
        """The event of a failure after the first byte; send :data:`DONE` behind it and close."""
        return b"data: " + error_body(error) + b"\n\n"


def _end_members(
    logprobs: bytes,
    finish_reason: str | None,
    stop_reason: str | int | None,
    extra: bytes | None,
) -> bytes:
    """What follows a choice's text, with vLLM's and SGLang's names for the cause of its end."""
    members = b',"logprobs":' + logprobs
    if finish_reason is None:
        members += b',"finish_reason":null'
    else:
        reason = b"null" if stop_reason is None else orjson.dumps(stop_reason)
        members += b',"finish_reason":"%b","stop_reason":%b,"matched_stop":%b' % (
            finish_reason.encode(),
            reason,
            reason,
        )
    return members + b"," + extra if extra else members


class Choice(NamedTuple):
    """One whole answer; members as the arguments of :meth:`StreamFormat.delta`.

    ``message`` is a chat's, where it has more than content.
    """

    text: str
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    extra: bytes | None = None
    logprobs: bytes = b"null"
    message: Mapping[str, Any] | None = None


def chat_response(
    *,
    response_id: str,
    created: int,
    model: str,
    choices: Sequence[Choice],
    usage: Mapping[str, Any],
) -> bytes:
    """A whole ``chat.completion``; arguments as those of :class:`StreamFormat`."""
    told = []
    for index, choice in enumerate(choices):
        plain = {"role": "assistant", "content": choice.text, "refusal": None}
        told.append(_choice(choice, {"index": index, "message": choice.message or plain}))
    head = {"id": response_id, "object": "chat.completion", "created": created, "model": model}
    return orjson.dumps({**head, "choices": told, "usage": usage})


def completion_response(
    *,
    response_id: str,
    created: int,
    model: str,
    choices: Sequence[Choice],
    usage: Mapping[str, Any],
) -> bytes:
    """A whole ``text_completion``; arguments as those of :class:`StreamFormat`."""
    told = [_choice(each, {"index": n, "text": each.text}) for n, each in enumerate(choices)]
    head = {"id": response_id, "object": "text_completion", "created": created, "model": model}
    return orjson.dumps({**head, "choices": told, "usage": usage})


def _choice(choice: Choice, head: dict[str, Any]) -> dict[str, Any] | orjson.Fragment:
    """A choice of a body that begins with ``head``."""
    if choice.extra is None and choice.logprobs == b"null":  # nothing in it is JSON already
        head["logprobs"] = None
        head["finish_reason"] = choice.finish_reason
        head["stop_reason"] = head["matched_stop"] = choice.stop_reason
        return head
    end = _end_members(choice.logprobs, choice.finish_reason, choice.stop_reason, choice.extra)
    return orjson.Fragment(orjson.dumps(head)[:-1] + end + b"}")


def usage_dict(
    prompt_tokens: int,
    completion_tokens: int,
    trserve: Mapping[str, Any] | None = None,
    cached_tokens: int = 0,
) -> dict[str, Any]:
    """OpenAI's ``usage``, with the prompt tokens that were cached and trserve's own member."""
    usage: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
    if trserve is not None:
        usage["trserve"] = trserve
    return usage


class UsageTotal:
    """The usage of a response from those of its choices, of which one at a time may change.

    Args:
        parts: of the choices in their order, as :func:`usage_dict` made them, with ``trserve``.
        n: choices of each prompt, which counts once.
    """

    def __init__(self, parts: Sequence[Mapping[str, Any]], n: int) -> None:
        self._parts = list(parts)
        self._n = n
        own = [part["trserve"] for part in parts]
        self._tokens = {
            name: sum(part["tokens"][name] for part in own) for name in own[0]["tokens"]
        }
        self._handoffs = sum(part["handoffs"] for part in own)
        self._pending = [part["pending_ms"] for part in own]
        self._pending_ms = sum(self._pending)
        self._degraded = sum(part["degraded"] for part in own)
        seeds = [part["seed"] for part in own]
        self._seeds = {"seed": seeds[0]} | ({"seeds": seeds[::n]} if len(seeds) > n else {})
        self._prompts = sum(part["prompt_tokens"] for part in parts[::n])
        self._cached = sum(_cached(part) for part in parts[::n])

    def replace(self, index: int, part: Mapping[str, Any]) -> None:
        """The usage of the choice ``index`` is ``part`` by now."""
        old, self._parts[index] = self._parts[index], part
        was, own = old["trserve"], part["trserve"]
        for name, count in own["tokens"].items():
            self._tokens[name] += count - was["tokens"][name]
        self._handoffs += own["handoffs"] - was["handoffs"]
        self._degraded += own["degraded"] - was["degraded"]
        if own["pending_ms"] != was["pending_ms"]:
            # Told once, at a choice's end. Floats, unlike counts, do not add up in any order.
            self._pending[index] = own["pending_ms"]
            self._pending_ms = sum(self._pending)
        if index % self._n == 0:
            self._cached += _cached(part) - _cached(old)

    def usage(self) -> dict[str, Any]:
        """All of them as one."""
        tokens = dict(self._tokens)
        total = sum(tokens.values())
        trserve = {
            "tokens": tokens,
            "handoffs": self._handoffs,
            "share": (total - next(iter(tokens.values()))) / total if total else 0.0,
            "pending_ms": self._pending_ms,
            "degraded": self._degraded > 0,
            **self._seeds,
        }
        return usage_dict(self._prompts, total, trserve, self._cached)


def _cached(part: Mapping[str, Any]) -> int:
    cached: int = part["prompt_tokens_details"]["cached_tokens"]
    return cached


def total_usage(parts: Sequence[Mapping[str, Any]], n: int) -> dict[str, Any]:
    """What :class:`UsageTotal` says of ``parts``; a single one may have any members."""
    return dict(parts[0]) if len(parts) == 1 else UsageTotal(parts, n).usage()


def error_body(error: RequestError) -> bytes:
    """The OpenAI error envelope; all four members are always there.

    It may repeat a client's words, in which JSON or a path can have put what no UTF-8 text holds.
    """
    return orjson.dumps(
        {
            "error": {
                "message": _utf8(error.message),
                "type": error.type,
                "param": None if error.param is None else _utf8(error.param),
                "code": error.code,
            }
        }
    )


def _utf8(text: str) -> str:
    """``text`` with a question mark for each half of a surrogate pair."""
    return text.encode("utf-8", "replace").decode()


def models_body(lengths: Mapping[str, int], created: int) -> bytes:
    """The list of /v1/models, from the longest row of each name."""
    models = [_model(name, created, length) for name, length in lengths.items()]
    return orjson.dumps({"object": "list", "data": models})


def model_body(name: str, created: int, max_model_len: int) -> bytes:
    """One model, for /v1/models/{id}."""
    return orjson.dumps(_model(name, created, max_model_len))


def _model(name: str, created: int, max_model_len: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "trserve",
        "root": name,
        "parent": None,
        "max_model_len": max_model_len,
        "permission": [],
    }
