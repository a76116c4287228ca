"""A request as one worker knows it. Knows no router, no scheduler and no device.

What is shared lies in the slab; this object holds what only this worker needs: how much of the
row it has computed, in which KV blocks, and the parameters, decoded once at first contact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trserve.ipc.annotations import AnnotationBook
from trserve.ipc.baton import BANK_SHIFT, HOP_MASK, LENGTH_SHIFT, WITHOUT_LENGTH, Finish
from trserve.params import RequestParams
from trserve.workers.adjustments import Adjustment
from trserve.workers.grammar import Constraint
from trserve.workers.states import TRANSITIONS, Event, State, advance

# To look up a member costs as much as to take its move.
_CAME_BACK: Final = Event.CAME_BACK
_CAME_BACK_EMPTY: Final = Event.CAME_BACK_EMPTY
_move: Final = TRANSITIONS.get


class Request:
    """One slot's request in one worker; also the ``RequestView`` that routers see.

    Attributes:
        slot, gen: where it lives in the slab, and which use of the slot it is.
        length: committed length of the row as of the last baton that named this worker.
        num_computed: tokens of the row whose KV is valid here.
        num_early: prompt tokens that were computed here before the request came for the first time.
        num_cached: how many of the first blocks are in the prefix cache, for others to share.
        dropped_at: the table's version when it last had to give up its KV.
        block_hashes: of the row's first full blocks, as far as they were needed.
        hop: the last hop that was handled here; -1 before the first.
        arrival_length: committed length of the row when the baton came.
        arrived_empty: whether the hop that brought the baton had committed nothing.
        arrived_alone: whether it was taken back from a model that cannot be reached.
        banks: the slot's two ``extras`` banks.
        peers_left: the words ``left`` of the slab, of each peer.
        pinned: whether the request never leaves this worker, whatever the router says.
        adjustment: its biases and penalties, or None where it has none.
        constraint: where it stands in its grammar, or None where it has none.
        book: where the annotations of its tokens go, or None where none are wanted.
        end_ids: tokens that ``min_tokens`` keeps away while the row is shorter than ``min_length``;
            stop_ids: those that end the request.
        base_word: the baton word while this worker has it, but for its length.
        visible: tokens of the row that a router may see where they are more than the committed
            ones: those, plus one just sampled.
    """

    __slots__ = (
        "_peers_left",
        "_row",
        "adjustment",
        "arrival_length",
        "arrived_alone",
        "arrived_empty",
        "bank",
        "banks",
        "base_word",
        "block_hashes",
        "block_table",
        "book",
        "constraint",
        "dropped_at",
        "end_ids",
        "extras",
        "gen",
        "hop",
        "last_store_ns",
        "length",
        "limit",
        "min_length",
        "num_blocks",
        "num_cached",
        "num_computed",
        "num_early",
        "params",
        "pending_ns",
        "pinned",
        "prompt_len",
        "runnable_since_ns",
        "sampling",
        "slot",
        "state",
        "stop_ids",
        "visible",
    )

    def __init__(
        self,
        *,
        slot: int,
        gen: int,
        params: RequestParams,
        prompt_len: int,
        limit: int,
        row: NDArray[np.int32],
        block_table: NDArray[np.int32],
        banks: tuple[memoryview, memoryview],
        peers_left: Sequence[memoryview],
    ) -> None:
        self.slot = slot
        self.gen = gen
        self.params = params
        self.sampling = params.sampling
        self.pinned = params.pinned or not peers_left
        self.end_ids = self.sampling.eos_token_ids + self.sampling.stop_token_ids
        self.stop_ids = frozenset(() if self.sampling.ignore_eos else self.end_ids)
        self.constraint: Constraint | None = None
        if params.grammar:  # an end that is drawn although it is ignored is all that was left
            self.stop_ids |= frozenset(self.sampling.eos_token_ids)
        self.adjustment = Adjustment.of(self.sampling, prompt_len)
        self.book: AnnotationBook | None = None
        self.prompt_len = prompt_len
        self.limit = limit
        self.min_length = prompt_len + self.sampling.min_tokens
        self._row = row
        self.block_table = block_table
        self.banks = banks
        self.num_blocks = 0
        self.num_computed = 0
        self.num_early = 0
        self.num_cached = 0
        self.dropped_at = -1
        # Committed tokens never change, so neither do these, whatever becomes of the KV.
        self.block_hashes: list[int] = []
        self.state = State.PENDING
        self.length = prompt_len
        self.visible = prompt_len
        self.hop = -1
        self.bank = 0
        self.base_word = 0
        self.arrival_length = prompt_len
        self.arrived_empty = self.arrived_alone = False
        self.pending_ns = 0
        self.last_store_ns = 0
        self.runnable_since_ns = 0
        self._peers_left = peers_left
        self.extras = b""

    @property
    def rid(self) -> int:
        """The generation, which the gateway never uses twice."""
        return self.gen

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """A read-only view of the row: committed, plus the token just sampled."""
        return self._row[: max(self.visible, self.length)]

    @property
    def committed_len(self) -> int:
        """Tokens that are final, prompt included."""
        return self.length

    @property
    def peer_locs(self) -> list[int]:
        """By the number of a peer: the row's length when it last gave the request away.

        0 for one that never had it, and for this worker (number 0). It is what they wrote in the
        slab themselves, and so outlives every process.
        """
        slot = self.slot
        return [0, *(left[slot] for left in self._peers_left)]

    @property
    def committed_here(self) -> int:
        """Tokens committed here since the baton arrived."""
        return self.length - self.arrival_length

    @property
    def word(self) -> int:
        """The baton word while this worker has it, ahead of the slab's by what is unpublished."""
        return self.base_word | self.length << LENGTH_SHIFT

    @property
    def finished(self) -> bool:
        """Whether the request is over."""
        return self.state is State.FINISHED

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next one can be sampled; at least 1 while runnable."""
        return self.length - self.num_computed

    @property
    def is_barred(self) -> bool:
        """Whether its grammar left nothing that may follow when it was last asked."""
        return self.constraint is not None and self.constraint.exhausted

    @property
    def num_generated(self) -> int:
        """Committed output tokens."""
        return self.length - self.prompt_len

    @property
    def is_new(self) -> bool:
        """Whether it is as the gateway sent it: no worker has committed to it or handed it on."""
        return self.hop == 0 and self.length == self.prompt_len

    @property
    def full(self) -> bool:
        """Whether the row is as long as it may get."""
        return self.length >= self.limit

    @property
    def needs_scoring(self) -> bool:
        """Whether log probabilities of the prompt are wanted and not all written yet."""
        return (
            self.book is not None
            and self.params.scores_prompt
            and max(1, self.book.scored) < self.prompt_len
        )

    def end_after(self, token: int) -> Finish | None:
        """Why the request is over with ``token``, which was just committed; None if it goes on."""
        if token in self.stop_ids:
            return Finish.STOP
        return Finish.LENGTH if self.length >= self.limit else None

    def token_bytes(self, start: int, stop: int) -> bytes:
        """The committed tokens from ``start`` to ``stop``, int32."""
        return self._row[start:stop].tobytes()

    def move(self, event: Event) -> None:
        """Take ``event``. Raises ValueError for an illegal move."""
        # The table has no state that is 0; where it has none at all, ``advance`` says so.
        self.state = _move((self.state, event)) or advance(self.state, event)

    def take_baton(self, word: int, arrival_length: int, now_ns: int) -> None:
        """Note what a baton word that names this worker says.

        ``arrival_length`` is the row's length when the baton came; a successor of a worker that
        ended finds it longer already.
        """
        self.length = self.visible = length = word >> LENGTH_SHIFT
        self.hop = word & HOP_MASK
        self.bank = word >> BANK_SHIFT & 1
        self.base_word = word & WITHOUT_LENGTH
        self.arrival_length = arrival_length
        self.runnable_since_ns = now_ns
        # A step never computes 0 tokens: with nothing new to take in, the last one is repeated.
        if self.num_computed >= length:
            self.num_computed = length - 1
        self.move(_CAME_BACK if self.num_computed else _CAME_BACK_EMPTY)
