"""The tokens that emulated models make up: of the row's last token and its place alone.

So the same row goes on with the same token in any batch, after any handoff or restart. Knows ids;
nothing of requests, logits or time.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trserve.gateway.tokenizer import Tokenizer

_UInt64Array = NDArray[np.uint64]
_MULTIPLIERS: Final = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS: Final = (np.uint64(30), np.uint64(27), np.uint64(31))
_TOKEN: Final = np.uint64(0x9E3779B97F4A7C15)
_MODEL: Final = 0xD1B54A32D192ED03
_WORD: Final = 2**64
_53_BITS: Final = np.uint64(11)


def printable_ids(tokenizer: Tokenizer, excluded: Collection[int]) -> NDArray[np.int64]:
    """Ids that are a piece of readable text each, in rising order; those of no text where none is.

    ``excluded`` and the tokenizer's special ids are not among them.
    """
    out = tokenizer.special_ids.union(excluded, tokenizer.eos_token_ids)
    texts = tokenizer.token_texts
    known = [i for i in range(tokenizer.size) if i not in out]
    readable = [i for i in known if texts is not None and _is_readable(texts[i])]
    return np.array(readable if len(readable) > 1 else known, np.int64)


def _is_readable(text: str | bytes) -> bool:
    return isinstance(text, str) and bool(text.strip()) and text.isprintable()


class TokenSource:
    """Tokens of model ``model``.

    Args:
        ids: int64 [K], those to choose from, two or more.
        agreement: probability that it makes the token that model 0 makes there.
        seed: chooses among all such sources.
    """

    def __init__(
        self, ids: NDArray[np.int64], *, model: int, agreement: float, seed: int = 0
    ) -> None:
        assert len(ids) > 1
        self._ids = ids
        self._count = np.uint64(len(ids))
        self._others = np.uint64(len(ids) - 1)
        self._seed = np.uint64(seed)
        self._agrees = model == 0 or agreement >= 1
        self._agreement = agreement
        self._salt = np.uint64(_MODEL * (model + 1) % _WORD)

    def after(
        self, token_ids: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """The token after each of ``token_ids`` [B], which is at its entry of ``positions`` [B]."""
        mixed = token_ids.view(np.uint64) * _TOKEN
        mixed ^= positions.view(np.uint64)
        mixed = _mix(_mix(mixed) ^ self._seed)
        chosen = mixed % self._count
        if not self._agrees:
            own = _mix(mixed ^ self._salt)
            differs = np.ldexp((own >> _53_BITS).astype(np.float64), -53) >= self._agreement
            # Any of the others, never the first model's.
            step = np.where(differs, _mix(own) % self._others + np.uint64(1), np.uint64(0))
            chosen = (chosen + step) % self._count
        return self._ids[chosen.view(np.int64)]


def _mix(words: _UInt64Array) -> _UInt64Array:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014): a bijection that avalanches."""
    words = (words ^ (words >> _SHIFTS[0])) * _MULTIPLIERS[0]
    words = (words ^ (words >> _SHIFTS[1])) * _MULTIPLIERS[1]
    mixed: _UInt64Array = words ^ (words >> _SHIFTS[2])
    return mixed
