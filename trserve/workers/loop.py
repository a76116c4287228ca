"""The loop of a worker: take in, decode, send out. Knows no HTTP, no tokenizer and no peers' pace.

Each iteration is three stages, and no stage waits for another worker: (1) drain the rings and look
at the slots they hint at, (2) if the gate is open, one step over the runnable requests, (3) publish
what it committed and handed off. Beside a device the bell of whoever streams that is rung in the
next iteration's step, once the device has it, and before anything else that may take long. With
the gate closed the worker sleeps until something comes, or the gate opens by itself. With nothing
runnable it sleeps on its doorbell, the control socket and the launcher's life; the sleep ends after
a second at the latest, and one that ends so and finds work is counted, because it means that a
doorbell was missed.
"""

from __future__ import annotations

import logging
import select
import time
from collections.abc import Callable, Sequence
from typing import Final

from trserve.ipc.baton import Finish
from trserve.ipc.links import LinkReceiver
from trserve.ipc.publish import Outbox
from trserve.ipc.rings import Kind
from trserve.ipc.tally import TallyWriter
from trserve.workers.gates import Gate
from trserve.workers.step_cycle import StepCycle
from trserve.workers.table import RequestTable
from trserve.workers.tracing import WorkerTrace

log = logging.getLogger(__name__)
BELT_S: Final = 1.0
_PREFILL: Final = Kind.PREFILL
NOTE_AFTER_S: Final = 0.01
"""A worker that falls idle for less than this says what it did in its next step. Later than the
kernel's next tick: to set a timer before it takes longer than all that is said."""
QUIET_TURNS: Final = 256
"""Turns that end idle after which it is said at once, if no step and no longer rest came between: a
worker that only says where requests go may have neither for hours."""


class WorkerLoop:
    """Runs one worker until it is told to stop or the launcher is gone.

    Args:
        bell: this worker's doorbell.
        rings: the consuming ends of every link towards this worker.
        control_fd: edge-triggered descriptor of the control socket.
        on_control: takes in all control messages; returns False to end the loop.
        launcher_fd: pidfd of the launcher; readable once it has ended.
        gate: says whether what is runnable waits for more.
        outbox: makes the iteration's results visible.
        tally: where their times are summed up.
        trace: where the steps are noted.
        strict: KV blocks that do not add up end the worker instead of being repaired (tests).
    """

    def __init__(
        self,
        *,
        bell: int,
        rings: Sequence[LinkReceiver],
        control_fd: int,
        on_control: Callable[[], bool],
        launcher_fd: int,
        table: RequestTable,
        tally: TallyWriter,
        cycle: StepCycle,
        gate: Gate,
        outbox: Outbox,
        trace: WorkerTrace | None = None,
        strict: bool = False,
    ) -> None:
        self._bell = bell
        self._rings = rings
        self._control_fd = control_fd
        self._on_control = on_control
        self._launcher_fd = launcher_fd
        self._table = table
        self._tally = tally
        self._cycle = cycle
        self._gate = gate
        self._wait_s = 0.0  # until the closed gate opens by itself
        self._outbox = outbox
        self._trace = trace
        self._strict = strict
        self._recount_due = False
        self._sleep_s = BELT_S
        self._quiet_turns = 0
        self.belt_finds = 0
        # Of steps: rows if none of them was a prompt's, rows, begin and end; until nobody waits.
        self._uncounted: list[tuple[int, int, int, int]] = []
        cycle.on_note = self._count
        cycle.on_submitted = self._while_it_computes
        cycle.on_detour = outbox.ring_held
        self._poller = select.epoll()
        # The bell is never read: a poll says once that it rang since the one before, and what is
        # published from then on rings again.
        self._poller.register(bell, select.EPOLLIN | select.EPOLLET)
        for fd in (control_fd, launcher_fd):
            self._poller.register(fd, select.EPOLLIN)

    def run(self) -> None:
        """Serve until stopped."""
        # What arrived before the first poll raised no edge for it; and what the others were told
        # of routing counts for the first request as well.
        if not self._on_control():
            return
        self._rescan()
        self._outbox.flush()
        try:
            while self.turn():
                pass
        finally:
            self._outbox.ring_held()

    def turn(self) -> bool:
        """One iteration; False once the loop is to end."""
        busy = bool(self._table.runnable or self._table.ahead)
        timeout = self._sleep_s
        if busy and self._wait_s < timeout:
            timeout = self._wait_s
        events = self._poller.poll(timeout)
        self._recount_due |= busy
        if len(events) == 1 and events[0][0] == self._bell:
            self._take_in(by_belt=False)
        elif not events and (self._wait_s or not busy) and self._sleep_s < BELT_S:
            self._note()
            if self._trace is not None and self._trace.meter is not None:
                self._trace.meter.fold()
            if not busy:
                return True
        elif (events or not busy) and not self._react({fd for fd, _ in events}, busy=busy):
            return False
        for request in self._table.cancelled() if busy else ():
            self._table.finish(request, Finish.ABORT)
        steps = self._step_if_open(time.monotonic_ns())
        idle = self._wait_s or not (self._table.runnable or self._table.ahead)
        if idle and (steps or events) and self._quiet_turns < QUIET_TURNS:
            # Whoever was just rung may be waiting for this core.
            self._quiet_turns += 1
            self._sleep_s = NOTE_AFTER_S
        elif not (steps and self._cycle.submits):
            self._note()
        return True

    def _step_if_open(self, now_ns: int) -> bool:
        """One step over what is runnable, if there is anything and the gate is open."""
        table, cycle, gate = self._table, self._cycle, self._gate
        waiting = len(table.runnable)
        self._wait_s = 0.0
        if waiting and cycle.has_rest:
            # The rest of a prompt does not wait: its request was through the gate.
            gate.goes_on(waiting)
        elif waiting:
            self._wait_s = gate.wait_s(waiting, now_ns)
        steps = bool(waiting or table.ahead) and not self._wait_s
        if steps:
            cycle.run(now_ns)
        else:
            cycle.rest(now_ns)
        self._outbox.ring_held()
        more = bool(table.runnable or table.ahead)
        self._outbox.flush(hold=steps and more and cycle.submits)
        gate.rest(len(table.runnable))
        if steps:
            self._uncounted.append((cycle.width, cycle.rows, now_ns, time.monotonic_ns()))
        return steps

    def _count(self) -> None:
        """Note the steps that have ended, as all that is said now."""
        self._quiet_turns = 0
        for width, rows, began, ended in self._uncounted:
            if width:
                self._tally.took(width, ended - began)
                self._gate.note_step(ended - began)
            if self._trace is not None:
                self._trace.step(width, rows, began, ended)
        self._uncounted.clear()

    def _while_it_computes(self) -> None:
        """A device has begun with a step: what the one before left to be said."""
        self._outbox.ring_held()
        self._note()

    def _note(self) -> None:
        """Say in the slab what was done; nobody waits for it."""
        self._sleep_s = BELT_S
        self._cycle.note()

    def _react(self, ready: set[int], *, busy: bool) -> bool:
        """Look at what woke the worker, or at nothing that did; False once the loop is to end."""
        self._outbox.ring_held()
        if self._launcher_fd in ready:
            log.error("the launcher ended; so does this worker")
            return False
        if self._control_fd in ready and not self._on_control():
            return False
        if self._bell in ready or not (busy or ready):
            self._take_in(by_belt=self._bell not in ready)
        if self._recount_due and not (busy or ready or self._table.runnable or self._table.ahead):
            # Once for each time that the worker falls idle, when nobody waits for it.
            self._table.check_blocks(strict=self._strict)
            self._recount_due = False
        return True

    def _take_in(self, *, by_belt: bool) -> None:
        missed = by_belt and not self._rang()
        if self._table.outdated:
            self._rescan()
        for ring in self._rings:
            if ring.overflowed():
                ring.drain()
                self._rescan()
            for descriptor in ring.drain():
                if missed:
                    self.belt_finds += 1
                    log.warning("the belt found %s: a doorbell was missed", descriptor)
                if descriptor.kind is _PREFILL:
                    self._table.expect(descriptor.slot, descriptor.gen)
                else:
                    self._table.sync(descriptor.slot, descriptor.gen)

    def _rang(self) -> bool:
        """Whether the bell rang since the last poll."""
        return any(fd == self._bell for fd, _ in self._poller.poll(0))

    def _rescan(self) -> None:
        self._outbox.ring_held()
        self._table.rescan()
        self._cycle.look_around()
