"""What a request asks of the workers, as the gateway writes it into the slab.

One msgpack blob a request, encoded once by the gateway, decoded once by each worker at first
contact. Knows nothing of HTTP, text or tensors.
"""

from __future__ import annotations

import zlib
from typing import Any

import msgspec

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: argmax, and nothing is divided by the temperature."""


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """What a request that names none of these gets; a checkpoint may suggest others."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are chosen and when a request ends.

    ``seed`` is 64 bits; the gateway draws one where the client left it out, so that a request
    is reproducible whatever happens to its workers. ``top_k`` 0 means off. ``logit_bias`` is what
    is added to the logits of these tokens; the penalties are explained in
    ``workers/adjustments.py``, and 1, 0 and 0 mean off.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}

    @property
    def greedy(self) -> bool:
        """Whether the arg max is taken instead of a sample."""
        return self.temperature < GREEDY_BELOW


class RequestParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The parameter blob of one slot.

    ``router`` holds the per-request router parameters (numbers by name). ``pinned``: only the
    model that the gateway chose may write. ``admit``: the router may choose which model writes
    first (not where the request names it). ``tops``: how many of the most probable tokens the
    annotation of each token names, None where no annotations are wanted; ``scores_prompt``: the
    prompt's tokens, but for the first, are annotated too; ``trace``: each token's annotation says
    what the router decided on; ``record``: an instance that records keeps what is computed for it.
    ``deadline_ns``: when whoever holds the baton ends it (``time.monotonic_ns``), 0 for never.
    ``grammar``: what the answer must follow, as :func:`pack_grammar` makes it; empty for anything.
    """

    sampling: SamplingParams
    router: dict[str, float] = {}
    pinned: bool = False
    admit: bool = True
    tops: int | None = None
    scores_prompt: bool = False
    trace: bool = False
    record: bool = True
    deadline_ns: int = 0
    grammar: bytes = b""

    @property
    def annotated(self) -> bool:
        """Whether the request has annotations."""
        return self.tops is not None or self.trace

    def first_record(self, prompt_len: int) -> int:
        """Row position of the first annotation record."""
        return 0 if self.scores_prompt else prompt_len


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[RequestParams] = msgspec.msgpack.Decoder(RequestParams)


def encode_params(params: RequestParams) -> bytes:
    """msgpack of ``params``."""
    return _encoder.encode(params)


def decode_params(blob: Any) -> RequestParams:
    """The inverse of :func:`encode_params`; ``blob`` is any bytes-like object."""
    return _decoder.decode(blob)


def pack_grammar(text: str) -> bytes:
    """A grammar for the blob: such texts are long and repeat themselves, and a blob is small."""
    return zlib.compress(text.encode(), 9)


def unpack_grammar(packed: bytes) -> str:
    """The inverse of :func:`pack_grammar`."""
    return zlib.decompress(packed).decode()
