"""The gateway's side of the slab: slots taken, filled, cancelled and freed.

Knows no text, no HTTP and no event loop. A slot is free again once the request is DONE and every
worker that ever heard of it has closed it; until then its words still mean something to somebody.

A gateway that follows one that died finds the slab in use and goes on from there: the slab alone
says which slots are free, which generations were used and who holds annotation pages.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import msgspec
import numpy as np

from trserve.errors import RequestError
from trserve.ipc.baton import (
    LENGTH_SHIFT,
    STATE_MASK,
    STATE_SHIFT,
    Finish,
    SlotState,
    pack,
    unpack,
)
from trserve.ipc.extras import write_extras
from trserve.ipc.fence import load_fence, store_fence
from trserve.ipc.layout import PARAMS_BYTES, pages_for
from trserve.ipc.publish import Outbox
from trserve.ipc.rings import Descriptor, Kind
from trserve.ipc.slab import Slab
from trserve.params import RequestParams, decode_params

_DONE_BITS = int(SlotState.DONE) << STATE_SHIFT
_FREE = pack(0, 0, SlotState.FREE, Finish.NONE, 0, 0)
_FILLING = pack(0, 0, SlotState.FILLING, Finish.NONE, 0, 0)


class Slot(msgspec.Struct, frozen=True):
    """One use of a slot."""

    index: int
    gen: int


def pages_of(params: RequestParams, prompt_len: int, limit: int) -> int:
    """Annotation pages of a request whose row may get ``limit`` tokens long."""
    if not params.annotated:
        return 0
    return pages_for(limit - params.first_record(prompt_len), params.tops or 0)


class SlotTable:
    """Every slot of the slab, as its one allocator sees them.

    Args:
        share: the slots that are this allocator's, all if there is no other; each has annotation
            pages in proportion.

    Attributes:
        overshoot: by model, the tokens that were written behind the end of an answer.

    What a gateway that died left in the slab is taken over: its LIVE and DONE slots count as
    answered (the launcher has cancelled them) and come back as soon as all workers closed them.
    """

    def __init__(self, slab: Slab, outbox: Outbox, share: range | None = None) -> None:
        self._slab = slab
        self._outbox = outbox
        total = slab.layout.slots
        slots = share or range(total)
        used = int(np.frombuffer(slab.gen, np.int64).max())
        # Beyond the largest ever used: each is in its slot until a larger one is. Of two allocators
        # one has the even ones, and the other the odd.
        self._generations = itertools.count(used + 1)
        if share is not None:
            self._generations = itertools.count((used // 2 + 1) * 2 + (share.start > 0), 2)
        self._pages: dict[int, list[int]] = {}
        self._closing: dict[int, tuple[int, int | None]] = {}
        self.overshoot = [0] * slab.layout.workers
        self._free = [i for i in reversed(slots) if not self._adopt(i)]
        taken = {page for pages in self._pages.values() for page in pages}
        pages = slab.layout.num_pages
        mine = range(pages * slots.start // total, pages * slots.stop // total)
        self._free_pages = [page for page in reversed(mine) if page not in taken]

    def _adopt(self, index: int) -> bool:
        """Whether a predecessor's request is still in the slot, which is then closing."""
        slab = self._slab
        state = unpack(slab.baton[index]).state
        if state is SlotState.FILLING:  # nobody else has heard of it
            slab.baton[index] = _FREE
        if state in (SlotState.FREE, SlotState.FILLING):
            return False
        load_fence()
        self._closing[index] = slab.gen[index], None
        params = decode_params(slab.params(index))
        if pages := pages_of(params, slab.prompt_len[index], slab.limit[index]):
            self._pages[index] = slab.page_table[index, :pages].tolist()
        return True

    @property
    def num_free(self) -> int:
        """Slots that a request can take now."""
        return len(self._free)

    @property
    def num_closing(self) -> int:
        """Slots whose request is answered, and that some worker still holds."""
        return len(self._closing)

    @property
    def num_free_pages(self) -> int:
        """Annotation pages that nobody holds."""
        return len(self._free_pages)

    def publish(
        self,
        prompt_ids: Sequence[int],
        params: bytes,
        *,
        limit: int,
        entry: int,
        pages: int = 0,
        expecting: Sequence[int] = (),
    ) -> Slot:
        """Fill a free slot and hand its baton to the worker ``entry``.

        Args:
            prompt_ids: the prompt; no longer than ``limit``.
            params: the encoded parameters.
            limit: the longest that the row may get, prompt included.
            pages: annotation pages that it needs; at most ``Layout.pages_per_request``.
            expecting: workers that may compute the prompt before the request comes to them.

        Raises:
            RequestError: the parameters do not fit (400), or too few pages are free (429).
            IndexError: no slot is free; ask ``num_free`` first.
        """
        if len(params) > PARAMS_BYTES:
            raise RequestError(
                f"the request's parameters take {len(params)} bytes; {PARAMS_BYTES} at most: "
                "give fewer stop_token_ids or a smaller logit_bias",
                param="stop_token_ids",
            )
        if pages > len(self._free_pages):
            raise RequestError(
                "the requests in the server hold all of the room for logprobs; try again later, "
                "or ask for fewer tokens or top logprobs",
                status=429,
                code="logprobs_full",
                retry_after=1,
            )
        prompt = np.asarray(prompt_ids, dtype=np.int32)
        slab, slot, gen = self._slab, self._free.pop(), next(self._generations)
        length = len(prompt)
        slab.baton[slot] = _FILLING
        store_fence()  # who sees the new use must not take the last one's end for its own
        slab.gen[slot] = gen
        slab.prompt_len[slot] = length
        slab.limit[slot] = limit
        slab.cached[slot] = -1
        for left in slab.left:
            left[slot] = 0
        sent = 1 << entry
        for worker in expecting:
            sent |= 1 << worker
        slab.sent[slot] = sent
        slab.tokens[slot, :length] = prompt
        slab.write_params(slot, params)
        if pages:
            held = self._pages[slot] = [self._free_pages.pop() for _ in range(pages)]
            slab.page_table[slot, :pages] = held
            slab.pages[held[0], 0] = 0  # nothing of the prompt is scored
        now = time.monotonic_ns()
        write_extras(slab.extras(slot, 0), now, 0, empty=False, length=length)
        self._outbox.store_baton(slot, pack(length, entry, SlotState.LIVE, Finish.NONE, 0, 0))
        self._outbox.send(entry, Descriptor(Kind.RUN, slot, gen, 0))
        for worker in expecting:
            self._outbox.send(worker, Descriptor(Kind.PREFILL, slot, gen, 0))
        self._outbox.flush()
        return Slot(slot, gen)

    def cancel(self, slot: Slot) -> None:
        """Have the request end; whoever holds blocks of it frees them within one step.

        One that is DONE stays as it is.
        """
        slab = self._slab
        if slab.baton[slot.index] & STATE_MASK == _DONE_BITS:
            return
        slab.cancel[slot.index] = slot.gen
        sent = slab.sent[slot.index]
        for worker in range(slab.layout.workers):
            if sent >> worker & 1:
                self._outbox.send(worker, Descriptor(Kind.CANCEL, slot.index, slot.gen, 0))
        self._outbox.flush()

    def release(self, slot: Slot, length: int | None = None) -> None:
        """The request is answered: take the slot back as soon as all workers have closed it.

        ``length`` is that of its row up to the end of the answer; what is behind it is overshoot.
        """
        self._closing[slot.index] = slot.gen, length

    def collect(self) -> bool:
        """Take back what can be; True if there was anything."""
        done = [index for index, (gen, _) in self._closing.items() if self._is_closed(index, gen)]
        for index in done:
            _, length = self._closing.pop(index)
            self._count_overshoot(index, length)
            self._slab.baton[index] = _FREE
            self._slab.cancel[index] = 0
            self._slab.sent[index] = 0
            self._free_pages += self._pages.pop(index, ())
            self._free.append(index)
        return bool(done)

    def _count_overshoot(self, index: int, length: int | None) -> None:
        end = self._slab.baton[index] >> LENGTH_SHIFT
        if length is not None and length < end:
            for source in self._slab.source[index, length:end].tolist():
                self.overshoot[source] += 1

    def _is_closed(self, index: int, gen: int) -> bool:
        slab = self._slab
        if slab.baton[index] & STATE_MASK != _DONE_BITS:
            return False
        load_fence()  # nobody adds to ``sent`` once the word says DONE
        sent = slab.sent[index]
        for worker, closed in enumerate(slab.closed):
            if sent >> worker & 1 and closed[index] != gen:
                return False
        return True
