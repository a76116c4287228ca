"""Philox4x32-10, the counter-based generator of the reference, and the uniform number of a draw.

After Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). Plain integers, one
block at a time: written to be read. It does not know models, requests or torch.
"""

from __future__ import annotations

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

Block = tuple[int, int, int, int]


def philox4x32(counter: Block, key: tuple[int, int]) -> Block:
    """The four 32-bit words of ``counter`` under ``key`` after ten rounds."""
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        left, right = _MULTIPLIERS[0] * x0, _MULTIPLIERS[1] * x2
        x0, x1, x2, x3 = (
            (right >> 32) ^ x1 ^ k0,
            right & _MASK,
            (left >> 32) ^ x3 ^ k1,
            left & _MASK,
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return x0, x1, x2, x3


def uniform(seed: int, position: int, model: int, purpose: int = 0) -> float:
    """A number in [0, 1) with 53 random bits.

    It depends on the request's 64-bit ``seed``, the ``position`` of the token in the whole row
    (prompt and output, from 0), the index of the ``model`` that draws and the ``purpose``.
    """
    key = (seed & _MASK, (seed >> 32) & _MASK)
    x0, x1, _, _ = philox4x32((position, model, purpose, 0), key)
    return ((x0 << 32 | x1) >> 11) * 2.0**-53
