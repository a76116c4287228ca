"""Every medium that moves suffixes, with a process on either side.

``emulated-cuda_ipc`` is the inbox over memory of another process; ``emulated-host_mapped``
registers the slab's rows. Those of a GPU are checked by ``bench/gpu_check.py`` and skip here.
"""

from __future__ import annotations

import json
import time
from contextlib import contextmanager

import pytest

from tests.ipc.device.peer import CONTRACT, GIVE_UP_S, MEDIA, hand_over, look, token
from tests.ipc.device.processes import introduce, memory, receiver_of, sender_of
from trserve.ipc.baton import Finish, SlotState, pack
from trserve.ipc.device.api import Piece, sync
from trserve.ipc.device.cpu_device import CpuDevice
from trserve.ipc.device.cuda_device import why_unavailable
from trserve.ipc.device.inbox import MAX_IDS
from trserve.ipc.device.inbox_medium import InboxMedium
from trserve.ipc.device.medium import SuffixFinder
from trserve.ipc.publish import Outbox
from trserve.ipc.rings import Descriptor, Kind
from trserve.ipc.slab import WorkerStatus

NAMES = CONTRACT


def expected_taken(first, last, name, slots, row):
    """How many of the suffixes of generations ``first`` to ``last`` are pushed."""
    if name != "emulated-cuda_ipc":
        return last - first
    taken = 0
    for gen in range(first, last):
        length = 4 + gen * 31 % (row - 4)
        taken += length - max(1, length - 1 - gen % 149) + 1 <= MAX_IDS
    return taken


@contextmanager
def world(name, *, slots=8, row_tokens=256):
    """A slab, and the medium of worker 1 in this process."""
    with memory(slots=slots, row_tokens=row_tokens) as shared:
        slab, api = shared.slab(), CpuDevice()
        medium = MEDIA[name](slab, 1, api)
        yield shared, slab, api, medium
        medium.close()


@pytest.mark.parametrize("name", NAMES)
def test_soak_between_two_processes(name, full):
    """Random lengths; every suffix compared, and by its checksum; what is short enough is taken."""
    total = 20_000 if full else 2_000
    with world(name) as (shared, slab, api, medium):
        sender = sender_of(shared, name, 1, total + 1)
        try:
            introduce(medium, sender)
            sender.tell("go")
            seen = look(slab, medium, api, medium.receiver(0, 1), total)
            pushed = sender.hear()["pushed"]
        finally:
            sender.kill()
    taken = expected_taken(1, total + 1, name, 8, 256)
    assert (seen["received"], seen["wrong"]) == (total, 0)
    assert seen["taken"] == taken > total // 3
    assert name != "emulated-cuda_ipc" or pushed == taken


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("after", [17, 500])
def test_a_producer_killed_in_mid_push_leaves_nothing_wrong_and_its_successor_goes_on(name, after):
    with world(name) as (shared, slab, api, medium):
        receiver = medium.receiver(0, 1)
        sender = sender_of(shared, name, 1, 10**6)
        introduce(medium, sender)
        sender.tell("go")
        seen = look(slab, medium, api, receiver, after)
        sender.kill()
        rest = look(slab, medium, api, receiver, 10**6, 0.01)
        assert (seen["last"] >= after, seen["wrong"], rest["wrong"]) == (True, 0, 0)
        for slot in range(8):
            slab.baton[slot] = 0  # as the launcher has it given back
        sender = sender_of(shared, name, 10**6 + 1, 10**6 + 101)
        try:
            introduce(medium, sender)
            sender.tell("go")
            again = look(slab, medium, api, receiver, 10**6 + 100)
        finally:
            sender.kill()
    assert (again["received"], again["wrong"]) == (100, 0)
    assert again["taken"] == expected_taken(10**6 + 1, 10**6 + 101, name, 8, 256)


@pytest.mark.parametrize("name", NAMES)
def test_a_consumer_killed_in_mid_take_costs_its_producer_nothing(name):
    with memory(slots=8, row_tokens=256) as shared:
        slab = shared.slab()
        medium = MEDIA[name](slab, 0, CpuDevice())
        outbox = Outbox(slab, {1: medium.sender(0, 1)}, shared.bells, worker=0)
        for life in range(2):  # they end while the producer pushes, and it never notices
            receiver = receiver_of(shared, name)
            introduce(medium, receiver)
            receiver.tell(10**9)
            for gen in range(1000 * life + 1, 1000 * life + 400):
                hand_over(slab, outbox, gen % 8, gen, range(20, 30), to=1)
                outbox.flush()
                if gen % 1000 == 200:
                    receiver.kill()
        medium.receiver(0, 1).drain()  # as the successor's rescan makes them void
        receiver = receiver_of(shared, name)
        introduce(medium, receiver)
        receiver.tell(2300)
        for gen in range(2001, 2301):
            hand_over(slab, outbox, gen % 8, gen, range(20, 30), to=1)
            outbox.flush()
            _await_given_away(slab, gen % 8, time.monotonic() + GIVE_UP_S)
        seen = receiver.hear()
        receiver.kill()
        medium.close()
    assert (seen["received"], seen["taken"], seen["wrong"]) == (300, 300, 0)


def _await_given_away(slab, slot, deadline):
    word = pack(30, 1, SlotState.LIVE, Finish.NONE, 0, slab.gen[slot])
    while slab.baton[slot] == word:
        assert time.monotonic() < deadline, "worker 1 takes nothing"
        time.sleep(0)


# -- one process, one emulated device ------------------------------------------------------


@contextmanager
def pair(*, slots=4, lag_s=None, workers=2):
    """The media of workers 0 and 1 over one device, not yet introduced."""
    with memory(slots=slots, row_tokens=256, workers=workers) as shared:
        slab, api = shared.slab(), CpuDevice(lag_s=lag_s)
        media = [InboxMedium(slab, index, api) for index in range(2)]
        yield shared, slab, api, media


def relay(media, messages):
    """What the launcher does, until nobody answers; JSON in between."""
    rounds = 0
    while messages:
        rounds += 1
        assert rounds < 5, "they never stop answering each other"
        messages = [
            answer
            for offer in json.loads(json.dumps(messages))
            if offer["to"] < len(media) and media[offer["to"]] is not None
            for answer in media[offer["to"]].accept(offer)
        ]


def started(media):
    relay(media, [offer for medium in media for offer in medium.offers()])


def handed(shared, slab, media, gen=1, slot=0, span=range(10, 15)):
    outbox = Outbox(slab, {1: media[0].sender(0, 1)}, shared.bells, worker=0)
    hand_over(slab, outbox, slot, gen, span, to=1)
    outbox.flush()
    return media[1].take(slot, gen, span.stop, span.start)


def test_before_and_after_they_know_each_other():
    with pair() as (shared, slab, api, media):
        assert handed(shared, slab, media) is None
        started(media)
        view = handed(shared, slab, media, gen=2)
        assert view is not None and view.num_ids == 5
        ids = memoryview(api.read(view.pointer, 20)).cast("i").tolist()
        assert ids == [token(2, at) for at in range(10, 15)]
        assert media[0].take(0, 2, 15, 10) is None, "it is in the other's inbox"
        out = api.allocate(2 << 20)
        assert media[1].collect([Piece(view.pointer, out + 8, view.num_ids)])
        assert api.read(out + 8, 20) == api.read(view.pointer, 20)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_lost_first_offer_is_made_good(order):
    """The one that starts first speaks before the other can hear."""
    with pair() as (shared, slab, _api, media):
        early, late = order
        alone: list[InboxMedium | None] = [None, None]
        alone[early] = media[early]
        relay(alone, media[early].offers())
        relay(media, media[late].offers())
        assert handed(shared, slab, media) is not None


def test_a_successors_entries_count_and_its_predecessors_do_not():
    with pair() as (shared, slab, api, media):
        started(media)
        assert handed(shared, slab, media) is not None
        late = media[0].offers()
        media[0] = InboxMedium(slab, 0, api)
        relay(media, media[0].offers())
        assert media[1].take(0, 1, 15, 10) is None, "pushed by a process that is dead"
        assert handed(shared, slab, media) is not None
        relay(media, late)
        assert handed(shared, slab, media, gen=2) is not None, "an offer of the dead"


def test_a_consumer_that_starts_anew_has_a_new_inbox():
    with pair() as (shared, slab, api, media):
        started(media)
        assert handed(shared, slab, media) is not None
        media[1] = InboxMedium(slab, 1, api)
        assert media[1].take(0, 1, 15, 10) is None
        relay(media, media[1].offers())
        assert handed(shared, slab, media, gen=2) is not None


def test_an_inbox_that_cannot_be_opened_leaves_the_row(caplog):
    with pair() as (shared, slab, _api, media):
        offers = [offer | {"notices": [1, 10**6, 1, 4096]} for offer in media[1].offers()]
        media[0].accept(offers[0] | {"epoch": 1})
        assert "its tokens go through the slab" in caplog.text
        assert handed(shared, slab, media) is None
        assert [d.gen for d in media[1].receiver(0, 1).drain()] == [1]


def test_a_full_ring_says_so_whatever_was_pushed_beside_it():
    with pair() as (shared, slab, _api, media):
        started(media)
        receiver, sender = media[1].receiver(0, 1), media[0].sender(0, 1)
        slab.gen[0] = slab.prompt_len[0] = 19
        slab.baton[0] = pack(20, 1, SlotState.LIVE, Finish.NONE, 0, 1)
        sent = 0
        while sender.push([Descriptor(Kind.RUN, 0, 19, 1)]):
            sent += 1
        assert sent == shared.layout.ring_capacity < media[0].pushed
        assert receiver.overflowed() and not receiver.overflowed()
        assert media[1].take(0, 19, 20, 19) is not None
        assert len(receiver.drain()) == sent
        assert sender.push([Descriptor(Kind.RUN, 0, 19, 1)])


def test_what_is_for_another_link_is_not_answered():
    with pair() as (_shared, _slab, _api, media):
        offer = media[1].offers()[0]
        assert media[0].accept(offer | {"link": "nccl"}) == []
        assert media[0].accept(offer | {"from": 7}) == []
        assert [answer["to"] for answer in media[0].accept(offer)] == [1]
        assert media[0].accept(offer) == [], "twice is no news"


def test_ids_that_come_late_are_taken_from_the_row():
    """A device copies when it comes to it; the descriptor may be there before."""
    with pair(lag_s=0.2) as (shared, slab, _api, media):
        started(media)
        assert handed(shared, slab, media) is None
        deadline = time.monotonic() + GIVE_UP_S
        while media[1].take(0, 1, 15, 10) is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_device_that_is_behind_is_not_waited_for(monkeypatch):
    with pair() as (shared, slab, api, media):
        started(media)
        monkeypatch.setattr(api, "push", lambda pushes: False)
        assert handed(shared, slab, media) is None
        assert media[0].pushed == 0
        monkeypatch.undo()
        assert handed(shared, slab, media, gen=2) is not None


def test_workers_without_a_device_link_have_rings():
    with pair(workers=3) as (_shared, slab, api, _media):
        medium = InboxMedium(slab, 0, api, peers=(1,))
        assert [offer["to"] for offer in medium.offers()] == [1]
        gateway = slab.layout.gateway
        for producer, consumer in ((gateway, 0), (0, 2), (2, 0)):
            assert medium.sender(producer, consumer).push([Descriptor(Kind.RUN, 0, 1, 1)])
            assert len(medium.receiver(producer, consumer).drain()) == 1


def test_the_view_goes_back_to_what_the_receiver_has_computed():
    with memory(slots=4, row_tokens=256) as shared:
        slab, run = shared.slab(), Descriptor(Kind.RUN, 2, 5, 9)
        finder = SuffixFinder(slab, 1)
        slab.tokens[2] = range(256)

        def found(length, *, left=0, prompt=0, hop=9):
            slab.left[1][2], slab.prompt_len[2] = left, prompt
            slab.baton[2] = pack(length, 1, SlotState.LIVE, Finish.NONE, 0, hop)
            return [memoryview(suffix.ids).cast("i").tolist() for suffix in finder.find([run])]

        assert found(50, left=48, prompt=10) == [[47, 48, 49]]
        assert found(50, prompt=48) == [[47, 48, 49]], "its prompt may be computed already"
        assert found(50) == [list(range(50))]
        assert found(MAX_IDS) == [list(range(MAX_IDS))]
        assert found(MAX_IDS + 1) == [], "longer than an entry"
        assert found(50, left=50, hop=10) == [], "the baton moved on"
        assert found(50, left=52) == []
        assert finder.find([Descriptor(Kind.DONE, 2, 5, 9)]) == []
        slab.workers[1].set("status", WorkerStatus.RESTARTING)
        assert found(50, left=48) == [], "its memory is gone"


@pytest.mark.skipif(bool(why_unavailable()), reason=f"no device: {why_unavailable()}")
def test_a_cuda_device_pushes_and_collects_in_one_process():
    from trserve.ipc.device.cuda_device import CudaDevice

    with memory(slots=4, row_tokens=256) as shared:
        slab, api = shared.slab(), CudaDevice()
        media = [InboxMedium(slab, index, api) for index in range(2)]
        started(media)
        handed(shared, slab, media)
        sync(api, 10.0)
        view = media[1].take(0, 1, 15, 10)
        assert view is not None
        out = api.allocate(2 << 20)
        api.collect([Piece(view.pointer, out, view.num_ids)])
        ids = memoryview(api.read(out, 20)).cast("i").tolist()
        assert ids == [token(1, at) for at in range(10, 15)]
