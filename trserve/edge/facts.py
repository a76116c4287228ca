"""What a server must know of a model at another host before it plans. Knows no sockets."""

from __future__ import annotations

import msgspec


class RemoteFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the other host says of one of its models.

    Attributes:
        max_model_len: the longest row, in tokens.
        eos_token_ids: the ids that end a text there, in the ids of the home's tokenizer.
        active_parameters: how many weights a token meets; 0 where nobody counted.
        dtype: a torch dtype's name, for people.
    """

    max_model_len: int
    eos_token_ids: list[int] = []
    active_parameters: int = 0
    dtype: str = ""
