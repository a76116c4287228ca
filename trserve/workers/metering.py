"""How long handoffs and steps took in one worker, from moments that were read for other reasons.

What happens is only remembered, by ``tracing``, and looked at here some steps later and some steps
at a time; then it is written down in plain words, which are summed up many steps at a time. To look
at each step's by itself, or to keep an object for each, makes handoffs slower by what it takes from
the caches alone. Knows requests by their slot and generation; no router, no model and no ring.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trserve.ipc.meter import MeterWriter, Numbers
from trserve.ipc.slab import Slab
from trserve.ipc.trace import EventKind
from trserve.workers.request import Request

FOLD_AFTER_NS: Final = 250_000_000
"""How long a busy worker keeps what it knows to itself."""

LEARN_AFTER: Final = 512
"""How many events are remembered before they are looked at, unless the worker is idle or time is
up: at 64 a handoff takes 0.15 us longer."""

_SENT: Final = int(EventKind.HANDOFF_SENT)
_STEP: Final = int(EventKind.STEP)
_TAKEN: Final = int(EventKind.RESUMED)
_RECORD_BYTES: Final = 64
_LEAST_RECORDS: Final = 2048
_write_step: Final = struct.Struct("=6q").pack_into  # began, ended, width, rows, router
_write_sent: Final = struct.Struct("=4q").pack_into  # when, to whom, tokens committed
_write_taken: Final = struct.Struct("=8q").pack_into  # began, since, from, stored, away, kind, lost
_KINDS: Final = ("first", "resume", "append", "reprefill")
_FIRST, _RESUME, _APPEND, _REPREFILL = range(len(_KINDS))
_NOBODY: Final = -1
_NEVER: Final = -1
_NOWHERE: Final = (-1, 0, 0)


class WorkerMeter:
    """Fills the meter of worker ``index``.

    Args:
        threshold: says what the router's first parameter is; NaN where it has none.

    Attributes:
        asked_ns: how long the router took in the step that runs; -1 if nobody looked.
        events: what is remembered, for :meth:`learn`.
    """

    def __init__(
        self, writer: MeterWriter, slab: Slab, index: int, threshold: Callable[[], float]
    ) -> None:
        self._to = writer
        self._left = slab.left
        self._source = slab.source
        self._others: Final = [w for w in range(slab.layout.workers) if w != index]
        self._threshold = threshold
        self.asked_ns = _NEVER
        self.events: list[tuple[int, ...]] = []
        self._only_other = self._others[0] if len(self._others) == 1 else _NOBODY
        slots = slab.layout.slots
        # As many as a step may leave, and more.
        records = max(_LEAST_RECORDS, 8 * slots)
        self._log = bytearray(records * _RECORD_BYTES)
        self._end = 0
        self._most = (records - 4 * slots) * _RECORD_BYTES
        self._folded_ns = 0
        # By slot: the generation that was taken into a step last, and its row's length when it
        # came; the one that left last, when, and its row's length then.
        self._came = [(-1, 0)] * slots
        self._went = [_NOWHERE] * slots
        self.fold()

    def failed(self, hook: str) -> None:
        """The router's ``hook`` raised, or returned what is no answer."""
        self._to.count(f"failed_{hook}")

    # -- writing down ------------------------------------------------------------------------

    def taken(self, request: Request, began_ns: int) -> None:
        """A step that began then has ``request``, which came for it; nothing is computed yet."""
        sender = _NOBODY
        if request.hop:
            sender = self._only_other if self._only_other >= 0 else self._sender(request)
        self.events.append(
            (
                _TAKEN,
                request.slot,
                request.gen,
                began_ns,
                request.runnable_since_ns,
                request.last_store_ns if request.hop else 0,
                sender,
                request.arrival_length,
                request.length,
                request.num_computed,
            )
        )

    def remember(self, events: Sequence[tuple[int, ...]]) -> None:
        """Take events as ``tracing`` remembers them; their fifth number is a time."""
        mine = self.events
        mine += events
        if len(mine) > LEARN_AFTER or mine[-1][4] - mine[0][4] > FOLD_AFTER_NS:
            self.learn()

    def learn(self) -> None:
        """Write down what was remembered. A step's own event is the last of what was in it."""
        for event in self.events:
            kind = event[0]
            if kind == _TAKEN:
                self._taken(*event[1:])
            elif kind == _SENT:
                self._sent(*event[2:])
            elif kind == _STEP:
                _, rows, _, began_ns, ended_ns, width, asked_ns = event
                self._ended(began_ns, ended_ns, width, rows, asked_ns)
        self.events.clear()

    def _taken(
        self,
        slot: int,
        gen: int,
        began_ns: int,
        since_ns: int,
        stored_ns: int,
        sender: int,
        arrival_length: int,
        length: int,
        num_computed: int,
    ) -> None:
        self._came[slot] = (gen, arrival_length)
        away_ns, kind, lost = _NEVER, _FIRST, 0
        went_gen, went_ns, went_length = self._went[slot]
        if stored_ns and went_gen == gen:
            away_ns = since_ns - went_ns
            # What it had computed then: its row, but perhaps for the last token.
            lost = went_length - 1 - num_computed
            kind = _REPREFILL if lost > 0 else _RESUME if length - num_computed == 1 else _APPEND
        at = self._place()
        _write_taken(
            self._log, at, _TAKEN, began_ns, since_ns, sender, stored_ns, away_ns, kind, lost
        )

    def _sent(self, slot: int, gen: int, when_ns: int, model: int, length: int) -> None:
        """A request has left, its row so long. One that was in no step here is not counted."""
        came_gen, arrival_length = self._came[slot]
        if came_gen == gen:
            self._went[slot] = (gen, when_ns, length)
            _write_sent(self._log, self._place(), _SENT, when_ns, model, length - arrival_length)

    def _ended(self, began_ns: int, ended_ns: int, width: int, rows: int, asked_ns: int) -> None:
        """A step has ended, and all that it decided is published."""
        at = self._place()
        _write_step(self._log, at, _STEP, began_ns, ended_ns, width, rows, asked_ns)
        if at > self._most or ended_ns - self._folded_ns > FOLD_AFTER_NS:
            self._folded_ns = ended_ns
            self._fold()

    def _place(self) -> int:
        """Where the next record goes."""
        if self._end == len(self._log):
            self._fold()  # there was no step for long
        self._end = end = self._end + _RECORD_BYTES
        return end - _RECORD_BYTES

    def _sender(self, request: Request) -> int:
        """Who handed it over; -1 if nobody can tell any more.

        A sender that committed something left a longer row than anybody before it. One that did
        not left it as long as whoever sent it there, and that one wrote the last token.
        """
        slot, length = request.slot, request.arrival_length
        found = [w for w in self._others if self._left[w][slot] == length]
        if len(found) > 1:
            writer = int(self._source[slot, length - 1])
            found = [w for w in found if w != writer]
        return found[0] if len(found) == 1 else _NOBODY

    # -- summing up --------------------------------------------------------------------------

    def fold(self) -> None:
        """Put all that is known into the slab; for a worker that has nothing else to do."""
        self.learn()
        self._fold()

    def _fold(self) -> None:
        self._to.threshold(self._threshold())
        if not self._end:
            return
        log = np.frombuffer(self._log, np.int64, self._end // 8).reshape(-1, _RECORD_BYTES // 8)
        self._end = 0
        steps, sent, taken = (log[log[:, 0] == kind, 1:].T for kind in (_STEP, _SENT, _TAKEN))
        self._fold_steps(*steps[:5])
        self._fold_sent(steps[:2], *sent[:3])
        self._fold_taken(steps[:2], *taken)

    def _fold_steps(
        self, began: Numbers, ended: Numbers, widths: Numbers, rows: Numbers, asked: Numbers
    ) -> None:
        to, took = self._to, ended - began
        to.count("busy_ns", int(took.sum()))
        to.batch_rows.observe(rows)
        to.observe_steps(widths[widths > 0], took[widths > 0])
        to.router.observe(asked[asked != _NEVER])

    def _fold_sent(
        self, steps: Numbers, when: Numbers, models: Numbers, committed: Numbers
    ) -> None:
        ended, inside = _ends(steps, when)
        when, models, committed = when[inside], models[inside], committed[inside]
        self._to.visit_tokens.observe(committed)
        for model in self._others:
            self._to.send[model].observe((ended - when)[models == model])

    def _fold_taken(
        self,
        steps: Numbers,
        began: Numbers,
        since: Numbers,
        senders: Numbers,
        stored: Numbers,
        away: Numbers,
        kinds: Numbers,
        lost: Numbers,
    ) -> None:
        to = self._to
        to.arrival.observe(began - since)
        handed = stored > 0
        to.away.observe(away[handed & (away != _NEVER)])
        for kind, count in zip(_KINDS, _counts(kinds[handed]), strict=True):
            to.count(kind, count)
        to.count("reprefill_tokens", int(lost[kinds == _REPREFILL].sum()))
        ends = np.zeros_like(began)
        found, inside = _ends(steps, began)
        ends[inside] = found
        for model in self._others:
            here = senders == model
            to.admission[model].observe((began - stored)[here])
            whole = here & inside
            to.exec[model].observe((ends - began)[whole])
            to.total[model].observe((ends - stored)[whole])


def _counts(kinds: Numbers) -> Sequence[int]:
    counts: list[int] = np.bincount(kinds, minlength=len(_KINDS)).tolist()
    return counts


def _ends(steps: Numbers, moments: Numbers) -> tuple[Numbers, NDArray[np.bool_]]:
    """When the steps ended that ``moments`` lie in, of those that lie in any; and which do.

    ``steps`` [2, S]: begin and end, in order.
    """
    began, ended = steps
    places = np.searchsorted(ended, moments)
    inside = places < len(ended)
    inside[inside] = began[places[inside]] <= moments[inside]
    return ended[places[inside]], inside
