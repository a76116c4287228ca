"""KV blocks of one worker: who holds which. Pure Python and numpy; knows no tensors.

Invariant, checked by ``check``: every block is free or in exactly one request's table.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from trserve.workers.request import Request


class BlockPool:
    """Hands out fixed-size blocks and takes them back.

    Args:
        num_blocks: blocks in all.
        block_size: tokens per block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def missing(self, request: Request, length: int) -> int:
        """Blocks that ``request`` lacks to hold the KV of its first ``length`` tokens."""
        return max(0, -(-length // self.block_size) - request.num_blocks)

    def extend(self, request: Request, length: int) -> bool:
        """Give ``request`` the blocks for ``length`` tokens; False, and nothing, if too few."""
        missing = self.missing(request, length)
        if missing > len(self._free):
            return False
        table: NDArray[np.int32] = request.block_table
        for index in range(request.num_blocks, request.num_blocks + missing):
            table[index] = self._free.pop()
        request.num_blocks += missing
        return True

    def release(self, request: Request) -> None:
        """Take back all blocks of ``request``; a request without any is left as it is."""
        held = request.block_table[: request.num_blocks]
        self._free.extend(held.tolist())
        request.num_blocks = 0
        request.num_computed = 0

    def check(self, requests: Iterable[Request]) -> None:
        """Raise AssertionError unless free and held blocks add up, none twice."""
        seen = list(self._free)
        for request in requests:
            seen.extend(request.block_table[: request.num_blocks].tolist())
        assert sorted(seen) == list(range(self.num_blocks)), (
            f"{len(self._free)} free and {len(seen) - len(self._free)} held blocks are not "
            f"the {self.num_blocks} that exist"
        )
