"""Whether parameters that came from another host are such that a worker here may be given them.

The home's gateway has checked what its clients said; that a frame says so is no proof. What is
looked at is what a worker could stumble over. Knows no frames and no slab.
"""

from __future__ import annotations

import math
import zlib
from typing import Final

from msgspec.structs import replace

from trserve.grammar_limits import MAX_GRAMMAR_BYTES
from trserve.ipc.layout import MAX_TOPS
from trserve.params import RequestParams, SamplingParams

MAX_VALUES: Final = 64
_UINT64: Final = 2**64
_INT64_MAX: Final = 2**63 - 1
_FLOAT32_MAX: Final = 3.4028235e38


def complaint(params: RequestParams, vocabulary: int) -> str | None:
    """What is wrong with ``params``, whose ids must be below ``vocabulary``; None for nothing."""
    sampling = params.sampling
    ids = (*sampling.stop_token_ids, *sampling.logit_bias)
    if any(not 0 <= token < vocabulary for token in ids):
        return "an id beyond the vocabulary"
    if any(not _is_real(value, _FLOAT32_MAX) for value in sampling.logit_bias.values()):
        return "a bias that is no number"
    if params.tops is not None and not 0 <= params.tops <= MAX_TOPS:
        return "too many log probabilities"
    if len(params.router) > MAX_VALUES or any(map(math.isnan, params.router.values())):
        return "a router's value that is no number"
    if not _is_grammar(params.grammar):
        return "a grammar that is too long, or none"
    return _sampling_complaint(sampling)


def without_unknown_ends(params: RequestParams, vocabulary: int) -> RequestParams:
    """``params`` without ends that nobody can draw.

    A checkpoint may name an end that its tokenizer lacks; a worker would meet it where it keeps
    ends away.
    """
    sampling = params.sampling
    known = tuple(token for token in sampling.eos_token_ids if 0 <= token < vocabulary)
    return replace(params, sampling=replace(sampling, eos_token_ids=known))


def _sampling_complaint(sampling: SamplingParams) -> str | None:
    if not (0.0 <= sampling.temperature <= _FLOAT32_MAX and 0.0 < sampling.top_p <= 1.0):
        return "a temperature or top_p out of range"
    if not (0 <= sampling.top_k <= _INT64_MAX and 0.0 <= sampling.min_p <= 1.0):
        return "a top_k or min_p out of range"
    if not (sampling.repetition_penalty > 0 and _is_real(sampling.repetition_penalty, 1e6)):
        return "a repetition penalty out of range"
    if not _is_real(sampling.presence_penalty, 1e6) or not _is_real(
        sampling.frequency_penalty, 1e6
    ):
        return "a penalty out of range"
    if not 0 <= sampling.seed < _UINT64:
        return "a seed out of range"
    if sampling.max_tokens < 0 or not 0 <= sampling.min_tokens <= _INT64_MAX:
        return "a number of tokens out of range"
    return None


def _is_real(value: float, most: float) -> bool:
    return math.isfinite(value) and abs(value) <= most


def _is_grammar(packed: bytes) -> bool:
    """Whether it unpacks to a text of a length that is no attack; the empty one is none."""
    if not packed:
        return True
    inflate = zlib.decompressobj()
    try:
        text = inflate.decompress(packed, MAX_GRAMMAR_BYTES)
        return inflate.eof and bool(text.decode())
    except (zlib.error, UnicodeDecodeError):
        return False
