"""What a visit is in the words of servers that take token ids: requests as JSON, and ids out of it.

``/v1/completions`` with the fields of vLLM (0.10.2 and later give ids; before that, tokens are
spelled ``token_id:N`` if asked), and SGLang's own ``/generate``, which has had ids all along. Knows
no sockets; every function is pure.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from enum import Enum
from typing import Any, Final

import orjson

from trserve.edge.cloud import Visit
from trserve.ipc.baton import Finish
from trserve.params import SamplingParams

SPELLED: Final = "token_id:"
_SEED_BITS: Final = 63
_HIGHEST_ID: Final = 2**31 - 1


class Dialect(Enum):
    """How a server is asked, by its path."""

    COMPLETIONS = "/v1/completions"
    GENERATE = "/generate"


class WireError(ValueError):
    """An answer that is none; says what is wrong with it."""


def dialect_of(models: Mapping[str, Any]) -> Dialect:
    """By what ``/v1/models`` says of its owner."""
    owners = {str(each.get("owned_by")) for each in models.get("data") or ()}
    return Dialect.GENERATE if owners == {"sglang"} else Dialect.COMPLETIONS


def request_body(dialect: Dialect, visit: Visit, model: str, tokens: int) -> bytes:
    """The JSON that asks for ``tokens`` tokens behind the row of ``visit``."""
    row = visit.row.tolist()
    if dialect is Dialect.GENERATE:
        return orjson.dumps(
            {
                "input_ids": row,
                "sampling_params": _generate_params(visit, tokens),
                "return_logprob": True,  # older ones have the ids there alone
                "logprob_start_len": -1,
                "top_logprobs_num": visit.params.tops or 0,
                "stream": False,
            }
        )
    return orjson.dumps(
        {
            "model": model,
            "prompt": row,
            "max_tokens": tokens,
            **_sampling(visit),
            "seed": seed_at(visit.params.sampling.seed, len(row)),
            "min_tokens": min(tokens, _tokens_before_an_end(visit)),
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "logprobs": visit.params.tops or 0,
            "stream": False,
        }
    )


def _generate_params(visit: Visit, tokens: int) -> dict[str, Any]:
    params = _sampling(visit)
    # Off is -1 there.
    params["top_k"] = params["top_k"] or -1
    return {
        **params,
        "max_new_tokens": tokens,
        "min_new_tokens": min(tokens, _tokens_before_an_end(visit)),
        "skip_special_tokens": False,
    }


def _sampling(visit: Visit) -> dict[str, Any]:
    sampling = visit.params.sampling
    ends = sorted({*sampling.eos_token_ids, *sampling.stop_token_ids})
    found: dict[str, Any] = {
        "temperature": 0.0 if sampling.greedy else sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "ignore_eos": sampling.ignore_eos,
        "stop_token_ids": [] if sampling.ignore_eos else ends,
    }
    if bias := _bias(visit):
        found["logit_bias"] = {str(token): value for token, value in bias.items()}
    return found


def _bias(visit: Visit) -> dict[int, float]:
    """Biases, and in them the presence and frequency penalties of the answer so far.

    A server that is given the answer as a prompt counts only what it writes itself.
    """
    sampling = visit.params.sampling
    bias = dict(sampling.logit_bias)
    if sampling.presence_penalty or sampling.frequency_penalty:
        for token, count in Counter(visit.row[visit.prompt_len :].tolist()).items():
            penalty = sampling.presence_penalty + sampling.frequency_penalty * count
            bias[token] = bias.get(token, 0.0) - penalty
    return bias


def _tokens_before_an_end(visit: Visit) -> int:
    return max(0, visit.prompt_len + visit.params.sampling.min_tokens - len(visit.row))


def seed_at(seed: int, position: int) -> int:
    """A seed for the tokens from ``position`` on, of 63 bits.

    With the request's own, every call of one token would draw the same number.
    """
    words = seed.to_bytes(8, "little") + position.to_bytes(8, "little")
    digest = hashlib.blake2b(words, digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - _SEED_BITS)


def read_answer(dialect: Dialect, body: bytes) -> tuple[Any, list[int]]:
    """The JSON of an answer, and the ids that the server wrote. WireError where it has none."""
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise WireError(f"its answer is no JSON ({error})") from None
    found = _generated(answer) if dialect is Dialect.GENERATE else _completed(answer)
    if not isinstance(found, list) or not all(_is_id(token) for token in found):
        raise WireError(
            "its answer has no token ids: it must be vLLM (0.10.2 or later, or with log "
            "probabilities), SGLang or trserve"
        )
    return answer, found


def _is_id(token: object) -> bool:
    return isinstance(token, int) and not isinstance(token, bool) and 0 <= token <= _HIGHEST_ID


def _completed(answer: Any) -> object:
    try:
        (choice,) = answer["choices"]
        if (ids := choice.get("token_ids")) is not None:
            return ids
        return [int(text.removeprefix(SPELLED)) for text in choice["logprobs"]["tokens"]]
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _generated(answer: Any) -> object:
    try:
        if (ids := answer.get("output_ids")) is not None:
            return ids
        return [token for _, token, *_ in answer["meta_info"]["output_token_logprobs"]]
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def cut_at_end(ids: list[int], visit: Visit, sampling: SamplingParams) -> tuple[list[int], Finish]:
    """``ids`` up to what ends the request, and why it does; NONE where it goes on.

    As whoever commits a token judges it (see ``Request.end_after``).
    """
    ends: frozenset[int] = frozenset()
    if not sampling.ignore_eos:
        ends = frozenset((*sampling.eos_token_ids, *sampling.stop_token_ids))
    start = len(visit.row)
    for count, token in enumerate(ids, 1):
        if token in ends:
            return ids[:count], Finish.STOP
        if start + count >= visit.limit:
            return ids[:count], Finish.LENGTH
    return ids, Finish.NONE


def refusal_of(body: bytes) -> str:
    """What an error's body says, in one line."""
    text = body.decode("utf-8", "replace")
    try:
        answer = orjson.loads(body)
        found = answer.get("error", answer) if isinstance(answer, dict) else answer
        text = str(found.get("message") or found) if isinstance(found, dict) else str(found)
    except orjson.JSONDecodeError:
        pass
    shown = "".join(c if c.isprintable() else " " for c in text[:1000])
    return " ".join(shown.split())[:200]
