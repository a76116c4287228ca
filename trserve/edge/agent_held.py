"""A request whose baton a link agent has, as the slab's words say. Knows no sockets, no policy."""

from __future__ import annotations

from dataclasses import dataclass

from trserve.ipc.baton import BANK_SHIFT, HOP_MASK, LENGTH_SHIFT, WITHOUT_LENGTH
from trserve.ipc.extras import read_extras
from trserve.ipc.slab import Slab
from trserve.params import RequestParams, decode_params


@dataclass(slots=True)
class Held:
    """A request whose baton the agent has.

    Attributes:
        word: its baton word, but for the length; ``length`` is the committed one, and
            ``arrival_length`` was that when it came.
        empty: whether the hop that brought it had committed nothing.
        pending_ns, stored_ns, extras: what came with it.
        stop_ids: tokens that end it.
        since: when it last moved, ``time.monotonic()``.
        asked: when the far side was last told of this visit, likewise.
        unfit: answers to this visit of which nothing can be right.
    """

    slot: int
    gen: int
    word: int
    length: int
    arrival_length: int
    prompt_len: int
    limit: int
    params: RequestParams
    stop_ids: frozenset[int]
    empty: bool
    pending_ns: int
    stored_ns: int
    extras: bytes
    since: float = 0.0
    asked: float = 0.0
    unfit: int = 0

    @property
    def hop(self) -> int:
        """Of the baton word."""
        return self.word & HOP_MASK

    @classmethod
    def of(cls, slab: Slab, slot: int, gen: int, word: int) -> Held:
        """What there is to know of the request when ``word`` came."""
        params = decode_params(slab.params(slot))
        sampling = params.sampling
        ends = sampling.eos_token_ids + sampling.stop_token_ids
        stop_ids = frozenset(() if sampling.ignore_eos else ends)
        if params.grammar:  # an end that is drawn although it is ignored is all that was left
            stop_ids |= frozenset(sampling.eos_token_ids)
        found = read_extras(slab.extras(slot, word >> BANK_SHIFT & 1))
        return cls(
            slot=slot,
            gen=gen,
            word=word & WITHOUT_LENGTH,
            length=word >> LENGTH_SHIFT,
            arrival_length=found.length,
            prompt_len=slab.prompt_len[slot],
            limit=slab.limit[slot],
            params=params,
            stop_ids=stop_ids,
            empty=found.empty,
            pending_ns=found.pending_ns,
            stored_ns=found.stored_ns,
            extras=found.router.rstrip(b"\0"),
        )
