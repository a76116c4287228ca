"""Golden requests to a server: a setting as a request body, a response as an answer.

Also checks what must hold for every single response whatever its tokens are: the usage adds up,
every token has one source, and the handoffs agree with the sources.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.golden.compare import Answer, compare
from tests.golden.reference import LLM, SLM, Setting, Trace
from tests.serverproc import Server

PATH = "/v1/completions"
SHAPING = (
    *("top_k", "top_p", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)


@dataclass(frozen=True)
class Reply:
    """An answer with the accounts that came with it."""

    answer: Answer
    models: Sequence[str]
    usage: dict[str, Any]


def body_of(prompt: Sequence[int], setting: Setting, models: Sequence[str]) -> dict[str, Any]:
    """The request of ``setting``; ``models`` are the server's names of the SLM and the LLM."""
    own: dict[str, Any] = {"trace": True}
    if setting.only is not None:
        own["only"] = models[setting.only]
    else:
        own["router"] = {"tau": setting.tau}
    if setting.entry != SLM:
        own["entry_model"] = models[setting.entry]
    plain = Setting()
    shaping = {
        name: getattr(setting, name)
        for name in SHAPING
        if getattr(setting, name) != getattr(plain, name)
    }
    if setting.logit_bias:
        shaping["logit_bias"] = {str(token): bias for token, bias in setting.logit_bias}
    return {
        "model": "trserve",
        "prompt": list(prompt),
        "max_tokens": setting.max_tokens,
        "temperature": setting.temperature,
        "seed": setting.seed,
        **shaping,
        "return_token_ids": True,
        "trserve": own,
    }


def ask(
    server: Server, prompt: Sequence[int], setting: Setting, stream: bool, **fields: Any
) -> Reply:
    """Sends one request, with further ``fields``, and reads the whole reply."""
    body = body_of(prompt, setting, server.models) | fields
    if stream:
        body["stream_options"] = {"include_usage": True}
        return _joined(list(server.stream(PATH, body, timeout_s=120.0)))
    response = server.post(PATH, body, timeout_s=120.0)
    (choice,) = response["choices"]
    trace = choice["trserve"]
    answer = Answer(choice["token_ids"], trace["source"], choice["finish_reason"])
    return Reply(answer, trace["models"], response["usage"])


def _joined(events: Sequence[dict[str, Any]]) -> Reply:
    *chunks, last = events
    assert last["choices"] == [], "the usage comes last, in a chunk without choices"
    tokens: list[int] = []
    sources: list[int] = []
    models: list[str] = []
    reasons = []
    for chunk in chunks:
        (choice,) = chunk["choices"]
        trace = choice.get("trserve") or {"source": []}
        ids = choice.get("token_ids") or []
        assert len(ids) == len(trace["source"]), f"one source a token in every chunk: {choice}"
        tokens += ids
        sources += trace["source"]
        models = trace.get("models", models)
        reasons.append(choice["finish_reason"])
    assert reasons[:-1] == [None] * (len(reasons) - 1), "only the last chunk has a finish reason"
    return Reply(Answer(tokens, sources, reasons[-1]), models, last["usage"])


def check_accounts(reply: Reply, trace: Trace, models: Sequence[str]) -> None:
    """The usage of ``reply`` against its own tokens and, where they are equal, the reference."""
    sources, usage = list(reply.answer.sources), reply.usage
    own = usage["trserve"]
    written = Counter(models[source] for source in sources)
    assert list(reply.models) == list(models)
    assert usage["completion_tokens"] == len(reply.answer.tokens)
    assert usage["prompt_tokens"] == len(trace.prompt)
    assert usage["total_tokens"] == len(trace.prompt) + len(reply.answer.tokens)
    assert 0 <= usage["prompt_tokens_details"]["cached_tokens"] < len(trace.prompt)
    assert {name: n for name, n in own["tokens"].items() if n} == dict(written)
    assert abs(own["share"] - sources.count(LLM) / len(sources)) < 1e-3
    assert own["seed"] == trace.setting.seed
    assert own["degraded"] is False
    _check_handoffs(own["handoffs"], sources, trace)
    if compare(trace, reply.answer).stop is None:
        assert own["handoffs"] == trace.handoffs


def _check_handoffs(handoffs: int, sources: Sequence[int], trace: Trace) -> None:
    """Each change of the writer is a hop; a visit without a token is two more, unseen here."""
    first = trace.setting.entry if trace.setting.only is None else trace.setting.only
    writers = [first, *sources]
    changes = sum(a != b for a, b in itertools.pairwise(writers))
    assert handoffs >= changes
    assert (handoffs - changes) % 2 == 0
