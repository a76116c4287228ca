"""One tokenizer's ids in another's: a 1:1 map for families that differ in special tokens alone.

A server's ids are those of its first model. A model whose tokenizer has the same tokens under other
ids is *loaded* in the first one's: the rows of its input embedding and of its head are put in the
first tokenizer's order, once. Nothing behind that knows of a map (rows of tokens, ends, biases, log
probabilities, prefix caches, routers), and a step costs what it costs without one.

Knows tokenizers and rows; no weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Protocol

import msgspec

_NAMED: Final = 4
"""Tokens that a message names before it only counts them."""


class Vocabulary(Protocol):
    """What a map needs of a tokenizer: :class:`trserve.gateway.tokenizer.Tokenizer` has it.

    Attributes:
        size: the largest id + 1.
        pieces: the bytes that each id stands for, None where there is no such id; None altogether
            where a token's text depends on its neighbours.
        added_ids: the ids beside the vocabulary that texts are made of: special tokens, mostly.
        bos_token_id, eos_token_ids: what begins and what ends a text.
    """

    size: int
    added_ids: frozenset[int]
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @property
    def pieces(self) -> Sequence[bytes | None] | None:
        """By id."""


class TokenMap(msgspec.Struct, frozen=True):
    """How a checkpoint's rows are put in the server's order; empty where they are in it.

    ``moved``: (id of the server, row of the checkpoint) where they differ, a permutation.
    ``absent``: ids below the server's number of them (none beyond is ever drawn) that stand for no
    token of this model, or for one that the server does not know: never drawn.
    """

    moved: tuple[tuple[int, int], ...] = ()
    absent: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.moved or self.absent)

    def to_server(self, ids: Iterable[int]) -> list[int]:
        """The server's ids of the checkpoint's ``ids``."""
        own = {row: server for server, row in self.moved}
        return [own.get(token, token) for token in ids]


class MapError(ValueError):
    """Two tokenizers of which neither is the other's renumbering; the message says where."""


def token_map(first: Vocabulary, other: Vocabulary) -> TokenMap:
    """How rows of a model with the tokenizer ``other`` are put in the order of ``first``.

    A token goes to the token of the same text; what begins or ends a text, where ``other`` has no
    such text, to what does so there. What ``other`` alone has is never drawn.

    Raises:
        MapError: a token that is no special one stands elsewhere; ``first`` has special tokens for
            which ``other`` has none: a prompt may hold them; or ``other`` has an end more than
            ``first``, which it could then never write: two ends cannot share an id.
    """
    if first.pieces is None or other.pieces is None:
        raise MapError("texts of its tokens depend on their neighbours")
    ours, theirs = _differing(first, other)
    rows = {piece: row for row, piece in theirs.items()}
    found = {token: rows[piece] for token, piece in ours.items() if piece in rows}
    _pair(found, ours, theirs, first.eos_token_ids, other.eos_token_ids)
    _pair(found, ours, theirs, _begin(first), _begin(other))
    if missing := [ours[token] for token in ours if token not in found]:
        raise MapError(f"it has no token for {_listed(missing)}, which a prompt may hold")
    alone = {row: piece for row, piece in theirs.items() if row not in found.values()}
    if lost := [alone[row] for row in other.eos_token_ids if row in alone]:
        raise MapError(
            f"{_listed(lost)} ends a text, but has no counterpart in the first one, whose ends "
            f"({_ends_of(first)}) stand for others of it; if the model does not write it, take it "
            "out of eos_token_id in config.json and generation_config.json, or eos_token in "
            "tokenizer_config.json"
        )
    return _completed(found, alone, first.size)


def _differing(first: Vocabulary, other: Vocabulary) -> tuple[dict[int, bytes], dict[int, bytes]]:
    """By id, the tokens of both where they are not the same; special ones, all of them."""
    size = max(first.size, other.size)
    pairs = enumerate(zip(_padded(first, size), _padded(other, size), strict=True))
    differing = [(token, *pair) for token, pair in pairs if pair[0] != pair[1]]
    for token, own, its in differing:
        if not (_may_move(first, token, own) and _may_move(other, token, its)):
            raise MapError(f"id {token} is {_text(own)} in one and {_text(its)} in the other")
    ours = {token: own for token, own, _ in differing if own is not None}
    return ours, {token: its for token, _, its in differing if its is not None}


def _padded(vocabulary: Vocabulary, size: int) -> list[bytes | None]:
    pieces = vocabulary.pieces or ()
    return [*pieces, *[None] * (size - len(pieces))]


def _may_move(vocabulary: Vocabulary, token: int, piece: bytes | None) -> bool:
    return piece is None or token in vocabulary.added_ids


def _pair(
    found: dict[int, int],
    ours: Mapping[int, bytes],
    theirs: Mapping[int, bytes],
    tokens: Iterable[int],
    rows: Iterable[int],
) -> None:
    """Add to ``found`` what ``tokens`` and ``rows``, of one office, have left, in their order."""
    taken = set(found.values())
    open_tokens = [token for token in tokens if token in ours and token not in found]
    open_rows = [row for row in rows if row in theirs and row not in taken]
    found.update(zip(open_tokens, open_rows, strict=False))


def _begin(vocabulary: Vocabulary) -> tuple[int, ...]:
    return () if vocabulary.bos_token_id is None else (vocabulary.bos_token_id,)


def _ends_of(vocabulary: Vocabulary) -> str:
    pieces = vocabulary.pieces or ()
    ends = [pieces[token] for token in vocabulary.eos_token_ids if token < len(pieces)]
    return _listed([piece for piece in ends if piece is not None]) or "none"


def _completed(found: Mapping[int, int], alone: Iterable[int], size: int) -> TokenMap:
    """``found`` made a permutation: rows that lost their place take those that are left over.

    ``alone`` are the rows of tokens that the server, which has ``size`` ids, does not know.
    """
    moved = {token: row for token, row in found.items() if token != row}
    places = sorted(set(moved.values()) - set(moved))
    left = sorted(set(moved) - set(moved.values()))
    pairs = sorted({**moved, **dict(zip(places, left, strict=True))}.items())
    unknown = TokenMap(tuple(pairs)).to_server(alone)
    return TokenMap(tuple(pairs), tuple(sorted(t for t in {*places, *unknown} if t < size)))


def _listed(pieces: Sequence[bytes]) -> str:
    shown = ", ".join(_text(piece) for piece in pieces[:_NAMED])
    more = len(pieces) - _NAMED
    return f"{shown} and {more} more" if more > 0 else shown


def _text(piece: bytes | None) -> str:
    return "no token" if piece is None else repr(piece.decode("utf-8", "replace"))
