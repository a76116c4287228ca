"""Prompts of requests that are written elsewhere, computed here before they come.

Without it the first handoff of a request waits for the peer to compute the whole prompt. So the
gateway tells a request's peers of its prompt when it publishes the request, and a peer computes it
when it has nothing of its own to do, one chunk at a time, looking for arrivals between two chunks.
Nobody loses KV blocks for it, and a request that is told of too late, or never comes, costs nothing
but the work. One whose prompt may have ended a worker is left alone until it comes: its writer may
never send it, and then nobody dies of it. Knows no rings; the table says whose prompts there are.
"""

from __future__ import annotations

from typing import Final

from trserve.ipc.layout import WORKER_WORDS
from trserve.ipc.slab import Slab
from trserve.workers.request import Request
from trserve.workers.runner import Runner
from trserve.workers.step import StepInputs
from trserve.workers.suspects import StepGuard
from trserve.workers.table import RequestTable

CHUNK: Final = 256
"""Tokens of a chunk at most: what an arrival may have to wait for."""

_SPARED: Final = 4
"""A share of one in so many blocks is left to requests that are here."""

_COMPUTED = WORKER_WORDS.index("early_tokens")
_USED = WORKER_WORDS.index("early_tokens_used")


class EarlyPrefill:
    """Computes what ``table`` expects, over the arrays and the runner of its owner's steps."""

    def __init__(
        self, slab: Slab, index: int, table: RequestTable, runner: Runner, inputs: StepInputs
    ) -> None:
        self._rows = slab.tokens
        self._suspect = slab.suspect
        self._words = slab.workers[index].words
        self._table = table
        self._runner = runner
        self._inputs = inputs
        self._chunk = min(CHUNK, len(inputs.token_ids))

    def run(self, guard: StepGuard) -> None:
        """One chunk of the prompt that has been expected longest; its KV is stored."""
        request = next(iter(self._table.ahead.values()))
        if self._suspect[request.slot] == request.gen:
            del self._table.ahead[request.slot]
            return
        pool = self._table.pool
        pool.match(request)
        start = request.num_computed
        tokens = min(request.prompt_len - start, self._chunk)
        if tokens > 0 and self._has_room(request, start + tokens):
            guard.enter([request.slot])
            self._inputs.clear()
            chunk = self._rows[request.slot, start : start + tokens]
            self._inputs.add_row(chunk, start, request.block_table)
            self._runner.forward(self._inputs)
            request.num_computed = start + tokens
            request.num_early += tokens
            pool.note_computed([(request, tokens)])
            self._words[_COMPUTED] += tokens
            guard.leave()
        else:
            tokens = 0
        if not tokens or request.num_computed == request.prompt_len:
            del self._table.ahead[request.slot]

    def note(self) -> None:
        """Say in the header words how much of it was of use."""
        self._words[_USED] = self._table.early_tokens_used

    def _has_room(self, request: Request, length: int) -> bool:
        """Give ``request`` blocks for ``length`` tokens, if many more are available."""
        pool = self._table.pool
        left = pool.num_available - pool.missing(request, length)
        return left >= pool.num_blocks // _SPARED and pool.extend(request, length)
