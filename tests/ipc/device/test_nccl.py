"""``nccl`` over an emulated communicator: order, one operation at a time, aborts, tokens kept."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager

import pytest

from tests.ipc.device.emulated_communicator import (
    EARLY_SENDS,
    STALL,
    EmulatedCommunicators,
)
from tests.ipc.device.peer import GIVE_UP_S, hand_over, look, token
from tests.ipc.device.processes import introduce, memory, sender_of
from tests.ipc.device.test_media import relay
from trserve.ipc.device.communicator import Guarded, Watchdog
from trserve.ipc.device.cpu_device import CpuDevice
from trserve.ipc.device.nccl_ends import RECORDS
from trserve.ipc.device.nccl_medium import NcclMedium
from trserve.ipc.publish import Outbox
from trserve.ipc.slab import WorkerStatus


def wait_for(condition, seconds=GIVE_UP_S):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@contextmanager
def pair(*, timeout_s=5.0, slots=16):
    """The media of workers 0 and 1, introduced and connected."""
    with memory(slots=slots, row_tokens=256) as shared:
        slab, api = shared.slab(), CpuDevice()
        made = EmulatedCommunicators(api)
        media = [NcclMedium(slab, index, api, made, timeout_s=timeout_s) for index in range(2)]
        relay(media, [offer for medium in media for offer in medium.offers()])
        wait_for(lambda: is_up(media))
        yield shared, slab, api, made, media
        for medium in media:
            medium.close()


def is_up(media):
    ends = (media[0].senders[1].end, media[1].receivers[0].end)
    return all(end is not None and end.is_up for end in ends)


def handed(shared, slab, media, gen, slots=(0,)):
    outbox = Outbox(slab, {1: media[0].sender(0, 1)}, shared.bells, worker=0)
    for slot in slots:
        hand_over(slab, outbox, slot, gen + slot, range(10, 15), to=1)
    outbox.flush()
    return media[1].receiver(0, 1).drain()


def test_a_suffix_arrives_after_its_header():
    with pair() as (shared, slab, api, made, media):
        found = handed(shared, slab, media, 1)
        assert [descriptor.gen for descriptor in found] == [1]
        wait_for(lambda: media[1].take(0, 1, 15, 10) is not None)
        view = media[1].take(0, 1, 15, 10)
        ids = memoryview(api.read(view.pointer, 20)).cast("i").tolist()
        assert ids == [token(1, at) for at in range(10, 15)]
        assert all(file.words[EARLY_SENDS] == 0 for file in made.files)


def test_what_does_not_fit_or_comes_meanwhile_is_not_sent():
    with pair() as (shared, slab, _api, made, media):
        end = media[0].senders[1].end
        for file in made.files:
            file.words[STALL] = 1
        assert len(handed(shared, slab, media, 100, range(RECORDS + 2))) == RECORDS + 2
        assert end.is_busy
        assert len(handed(shared, slab, media, 200, [12])) == 1, "descriptors wait for nothing"
        for file in made.files:
            file.words[STALL] = 0
        wait_for(lambda: not end.is_busy)
        wait_for(lambda: media[1].receivers[0].end.received == RECORDS)
        # What is counted was asked of the device, which may not be through with it.
        for slot in range(RECORDS):
            wait_for(lambda slot=slot: media[1].take(slot, 100 + slot, 15, 10) is not None)
        assert all(media[1].take(s, 100 + s, 15, 10) is None for s in (RECORDS, RECORDS + 1))
        assert media[1].take(12, 212, 15, 10) is None
        handed(shared, slab, media, 300)
        wait_for(lambda: media[1].take(0, 300, 15, 10) is not None)
        # The receiver may be through before the sender's own call has returned.
        wait_for(lambda: end.sent == RECORDS + 1)


def test_a_transfer_that_hangs_is_aborted_in_time_and_nothing_is_taken_of_it(caplog):
    with pair(timeout_s=0.4) as (shared, slab, _api, made, media):
        ends = media[0].senders[1].end, media[1].receivers[0].end
        for file in made.files:
            file.words[STALL] = 1
        began = time.monotonic()
        handed(shared, slab, media, 1)
        wait_for(lambda: not ends[0].is_up and not ends[1].is_up)
        assert 0.3 < time.monotonic() - began < 5.0
        assert all(end.guarded.is_aborted for end in ends)
        assert media[1].take(0, 1, 15, 10) is None, "half of a message was taken"
        assert slab.tokens[0, :15].tolist() == [token(1, at) for at in range(15)]
        assert [d.gen for d in handed(shared, slab, media, 2)] == [2], "the row goes on"
        wait_for(lambda: "its tokens go through the slab" in caplog.text)


def test_a_peer_that_died_ends_the_transfer_at_once_and_its_successor_is_joined():
    with pair(timeout_s=8.0) as (shared, slab, api, made, media):
        for file in made.files:
            file.words[STALL] = 1
        end, began = media[0].senders[1].end, time.monotonic()
        handed(shared, slab, media, 1)
        slab.workers[1].set("status", WorkerStatus.RESTARTING)
        wait_for(lambda: not end.is_up)
        assert time.monotonic() - began < 6.0, "it waited for the timeout"
        media[1].close()
        slab.workers[1].set("status", WorkerStatus.UP)
        media[1] = NcclMedium(slab, 1, api, made, timeout_s=8.0)
        relay(media, media[1].offers())
        wait_for(lambda: is_up(media))
        media[1].receiver(0, 1).drain()
        handed(shared, slab, media, 2)
        wait_for(lambda: media[1].take(0, 2, 15, 10) is not None)


def test_soak_between_two_processes_and_a_killed_producer(full):
    total = 20_000 if full else 400
    with memory(slots=8, row_tokens=256) as shared:
        slab, api = shared.slab(), CpuDevice()
        made = EmulatedCommunicators(api)
        medium = NcclMedium(slab, 1, api, made, timeout_s=1.0)
        receiver = medium.receiver(0, 1)
        for first, kill in ((1, True), (10**6 + 1, False)):
            last = first + total
            sender = sender_of(shared, "emulated-nccl", first, last)
            introduce(medium, sender)
            wait_for(lambda: medium.receivers[0].end.is_up)
            sender.tell("go")
            seen = look(slab, medium, api, receiver, last - 1, 0.05 if kill else None, 0.002)
            if kill:
                sender.kill()
                slab.workers[0].set("status", WorkerStatus.RESTARTING)
                look(slab, medium, api, receiver, last, 0.01)
                slab.workers[0].set("status", WorkerStatus.UP)
                for slot in range(8):
                    slab.baton[slot] = 0
            else:
                assert (seen["received"], seen["wrong"]) == (total, 0)
                sender.kill()
            assert seen["wrong"] == 0
            # The one that is killed may not have come to a message, on cores that are busy.
            assert kill or seen["taken"] > 0
        medium.close()
        assert all(file.words[EARLY_SENDS] == 0 for file in made.files)


# -- the guard alone -----------------------------------------------------------------------------


class Stuck:
    """An operation that is over only when aborted, and says nothing of it."""

    buffer = 0

    def __init__(self):
        self.over = False
        self.aborts = 0

    def finished(self):
        return self.over

    def abort(self):
        self.aborts += 1
        self.over = True


def guarded(**settings):
    made = Stuck()
    defaults = {"is_alive": lambda: True, "timeout_s": 30.0}
    return made, Guarded(made, **(defaults | settings))  # type: ignore[arg-type]


@pytest.mark.parametrize("settings", [{"timeout_s": 0.05}, {"is_alive": lambda: False}])
def test_the_watchdog_aborts_what_takes_too_long_or_has_no_peer(settings):
    made, guard = guarded(**settings)
    watchdog, began = Watchdog(0.01), time.monotonic()
    watchdog.add(guard)
    assert guard.run(lambda: None) is False
    assert time.monotonic() - began < 5.0
    assert made.aborts == 1 and guard.is_aborted
    assert guard.run(lambda: None) is False, "it is over for good"
    assert not guard.watch() and made.aborts == 1
    watchdog.close()


def test_a_watchdog_that_is_closed_leaves_nothing_under_way():
    """Whoever waits for an operation has no other bound."""
    (early, first), (late, second) = guarded(), guarded()
    watchdog = Watchdog(0.01)
    watchdog.add(first)
    waiting = threading.Thread(target=first.run, args=(lambda: None,))
    waiting.start()
    watchdog.close()
    waiting.join(5.0)
    assert not waiting.is_alive() and early.aborts == 1
    deadline = time.monotonic() + 5.0
    while not watchdog._is_over:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    watchdog.add(second)  # its join took so long
    assert late.aborts == 1 and second.run(lambda: None) is False


def test_an_abort_that_fails_leaves_the_watchdog_to_the_others(caplog):
    def fails():
        raise RuntimeError("unhandled system error")

    (bad, first), (good, second) = (guarded(timeout_s=0.02) for _ in range(2))
    bad.abort = fails
    watchdog = Watchdog(0.01)
    for guard in (first, second):
        watchdog.add(guard)
    assert first.run(lambda: None) is False
    assert second.run(lambda: None) is False
    assert good.aborts == 1 and "could not be aborted" in caplog.text
    watchdog.close()


def test_an_operation_that_nobody_is_ready_for_is_never_started():
    made, guard = guarded(timeout_s=0.02)
    watchdog = Watchdog(0.01)
    watchdog.add(guard)
    started = []
    assert guard.run(lambda: started.append(1), ready=lambda: False) is False
    assert started == [] and made.aborts == 1
    watchdog.close()


def test_what_was_over_before_the_abort_counts():
    made, guard = guarded()
    made.over = True
    assert guard.run(lambda: None) is True
    assert not guard.watch(), "nothing is under way"
    guard.abort()
    assert guard.run(lambda: None) is False


def test_an_abort_that_comes_first_wins_however_the_operation_ends():
    made, guard = guarded()
    results = []
    thread = threading.Thread(target=lambda: results.append(guard.run(lambda: None)))
    thread.start()
    time.sleep(0.02)
    assert guard.abort() is True
    assert guard.abort() is False
    thread.join(10)
    assert results == [False] and made.aborts == 1


def test_an_error_of_the_library_ends_the_communicator():
    made, guard = guarded()

    def fails():
        raise RuntimeError("unhandled system error")

    with pytest.raises(RuntimeError, match="unhandled"):
        guard.run(fails)
    assert guard.is_aborted and made.aborts == 1
