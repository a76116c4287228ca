"""Random numbers that depend on the request alone: counter-based, in any order, at any time.

A number is a function of (request seed, position, model, purpose): Philox4x32-10 (Salmon, Moraes,
Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011). Knows seeds and positions;
nothing of logits, tokens or requests.
"""

from __future__ import annotations

import sys

import numpy as np
import numpy.typing as npt

PURPOSE_SAMPLE = 0
PURPOSE_ROUTER = 1
PURPOSE_ADMIT = 2

_Float64Array = npt.NDArray[np.float64]
_Int64Array = npt.NDArray[np.int64]
_UInt32Array = npt.NDArray[np.uint32]
_UInt64Array = npt.NDArray[np.uint64]

_KEPT_BITS = 6
_NUMBERS_KEPT = 1 << _KEPT_BITS
"""Random numbers computed at a time for one request."""

_LOOK_AHEAD_FROM = _NUMBERS_KEPT * 3 // 4
"""From this offset on, a row's next numbers are computed along with what another row lacks."""

_MAX_BLOCKS = 4096
"""Blocks of random numbers remembered before all are forgotten: 2 MiB."""

_ROUNDS = 10
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], np.uint64)
_KEY_STEPS = np.array([[0x9E3779B9], [0xBB67AE85]], np.uint32)
# What is added to the key before round r, [rounds, 2, 1]; sums wrap at 32 bits, as they should.
_KEY_SCHEDULE = np.arange(_ROUNDS, dtype=np.uint32)[:, None, None] * _KEY_STEPS
_LOW, _HIGH = (0, 1) if sys.byteorder == "little" else (1, 0)


def philox(counters: _UInt32Array, keys: _UInt32Array) -> _UInt32Array:
    """Philox4x32-10, vectorised.

    Args:
        counters: uint32 [4, B].
        keys: uint32 [2, B].

    Returns:
        uint32 [4, B].
    """
    # Words 0 and 2 are multiplied in every round, words 1 and 3 are mixed in; the halves of the
    # products then change places.
    multiplied, mixed = counters[0::2], counters[1::2]
    round_keys = keys + _KEY_SCHEDULE
    for key in round_keys:
        products = np.multiply(multiplied, _MULTIPLIERS, order="C")
        words = products.view(np.uint32).reshape(2, -1, 2)[::-1]
        multiplied = words[..., _HIGH] ^ mixed ^ key
        mixed = words[..., _LOW]
    return np.stack((multiplied[0], mixed[0], multiplied[1], mixed[1]))


def uniforms(
    seeds: _UInt64Array, positions: npt.NDArray[np.integer], model: int, purpose: int
) -> _Float64Array:
    """One number in [0, 1) per row, float64 with 53 random bits.

    Args:
        seeds: uint64 [B], of the requests.
        positions: [B], of the token that the number is for.
        model: index of the model that draws.
        purpose: ``PURPOSE_SAMPLE``, ``PURPOSE_ROUTER`` or ``PURPOSE_ADMIT``.
    """
    seeds = np.ascontiguousarray(seeds, np.uint64)
    keys = np.empty((2, len(seeds)), np.uint32)
    keys[0] = seeds & np.uint64(0xFFFFFFFF)
    keys[1] = seeds >> np.uint64(32)
    counters = np.zeros((4, len(seeds)), np.uint32)
    counters[0] = positions
    counters[1] = model
    counters[2] = purpose
    high, low, _, _ = philox(counters, keys)
    bits = (high.astype(np.uint64) << np.uint64(32)) | low
    numbers: _Float64Array = np.ldexp((bits >> np.uint64(11)).astype(np.float64), -53)
    return numbers


class Numbers:
    """:func:`uniforms` for one model's sampling, remembered by blocks of positions.

    The generator's rounds cost the same for one number as for a block of them, and a request asks
    for one position after the other.
    """

    def __init__(self, model: int) -> None:
        self._model = model
        self._blocks: dict[tuple[int, int], _Float64Array] = {}
        self._ahead = _Ahead(np.empty(0, np.uint64))

    @property
    def num_blocks(self) -> int:
        """Blocks that are remembered."""
        return len(self._blocks)

    def at(self, seeds: _UInt64Array, positions: npt.NDArray[np.integer]) -> _Float64Array:
        """One number in [0, 1) for each of ``seeds`` [B] at its entry of ``positions`` [B]."""
        ahead = self._ahead
        if not ahead.is_for(seeds):
            ahead = self._ahead = _Ahead(seeds)
        blocks, offsets = positions >> _KEPT_BITS, positions & _NUMBERS_KEPT - 1
        stale = blocks != ahead.blocks
        if np.count_nonzero(stale):
            self._replace(np.flatnonzero(stale), ahead, seeds, blocks, offsets)
        numbers: _Float64Array = ahead.numbers[ahead.rows, offsets]
        return numbers

    def _replace(
        self,
        stale: _Int64Array,
        ahead: _Ahead,
        seeds: _UInt64Array,
        blocks: npt.NDArray[np.integer],
        offsets: npt.NDArray[np.integer],
    ) -> None:
        """Give the rows ``stale`` of ``ahead`` the numbers of their ``blocks``."""
        keys = list(zip(seeds[stale].tolist(), blocks[stale].tolist(), strict=True))
        found = {key: self._blocks[key] for key in keys if key in self._blocks}
        if missing := [key for key in dict.fromkeys(keys) if key not in found]:
            # A call for many costs little more than one for one.
            soon = np.flatnonzero(offsets >= _LOOK_AHEAD_FROM)
            after = zip(seeds[soon].tolist(), (blocks[soon] + 1).tolist(), strict=True)
            ahead_keys = [key for key in after if key not in self._blocks]
            found.update(self._remember(list(dict.fromkeys(missing + ahead_keys))))
        for row, key in zip(stale.tolist(), keys, strict=True):
            ahead.numbers[row] = found[key]
        ahead.blocks = blocks

    def _remember(self, keys: list[tuple[int, int]]) -> dict[tuple[int, int], _Float64Array]:
        """Compute the blocks ``keys`` and keep them; what was kept before may be forgotten."""
        if len(self._blocks) + len(keys) > _MAX_BLOCKS:
            self._blocks = {}
        seeds = np.array([seed for seed, _ in keys], np.uint64).repeat(_NUMBERS_KEPT)
        firsts = np.array([block * _NUMBERS_KEPT for _, block in keys])
        positions = (firsts[:, None] + np.arange(_NUMBERS_KEPT)).reshape(-1)
        numbers = uniforms(seeds, positions, self._model, PURPOSE_SAMPLE)
        made = dict(zip(keys, numbers.reshape(len(keys), -1), strict=True))
        self._blocks.update(made)
        return made


class _Ahead:
    """The numbers around the positions of the last step, of the requests with these seeds.

    ``numbers`` is [R, _NUMBERS_KEPT]; ``blocks`` [R] says which block each row of it is, -1 none.
    """

    def __init__(self, seeds: _UInt64Array) -> None:
        self._key = seeds.tobytes()
        self.rows = np.arange(len(seeds))
        self.blocks: npt.NDArray[np.integer] = np.full(len(seeds), -1)
        self.numbers: _Float64Array = np.empty((len(seeds), _NUMBERS_KEPT))

    def is_for(self, seeds: _UInt64Array) -> bool:
        """Whether its rows are those of ``seeds``."""
        return self._key == seeds.tobytes()
