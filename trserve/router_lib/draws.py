"""Random numbers for routers: of a request and a position, so the same after any restart.

Knows requests as routers see them; nothing of what a number decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from trserve.router_lib.base import RequestView
from trserve.workers.random_numbers import PURPOSE_ADMIT, PURPOSE_ROUTER, uniforms

_BITS: Final = 6
_BLOCK: Final = 1 << _BITS
"""Numbers computed at a time: a request asks for one position after the other."""

_MAX_BLOCKS: Final = 4096


class RouterDraws:
    """One number in [0, 1) for each request and the position of the token that it just sampled.

    A function of (request's seed, ``model``, position) alone, with the purpose of routing; what is
    remembered only saves time.
    """

    def __init__(self, model: int) -> None:
        self._model = model
        self._blocks: dict[tuple[int, int], list[float]] = {}

    def at(self, requests: Sequence[RequestView]) -> list[float]:
        """The numbers of ``requests``, in their order."""
        found = []
        for request in requests:
            seed, position = request.params.sampling.seed, request.committed_len
            key = seed, position >> _BITS
            block = self._blocks.get(key) or self._compute(key)
            found.append(block[position & _BLOCK - 1])
        return found

    def admit(self, request: RequestView) -> float:
        """The number that decides who writes the first token of ``request``."""
        seeds, positions = self._seeds(request.params.sampling.seed, 1), [request.prompt_len]
        return float(uniforms(seeds, np.array(positions), self._model, PURPOSE_ADMIT)[0])

    def _compute(self, key: tuple[int, int]) -> list[float]:
        if len(self._blocks) >= _MAX_BLOCKS:
            self._blocks.clear()
        seed, block = key
        positions = block * _BLOCK + np.arange(_BLOCK)
        numbers = uniforms(self._seeds(seed, _BLOCK), positions, self._model, PURPOSE_ROUTER)
        found: list[float] = numbers.tolist()
        self._blocks[key] = found
        return found

    @staticmethod
    def _seeds(seed: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        return np.full(count, seed, np.uint64)
