"""What the protocol asks of a link, of every medium: ``trserve/ipc/links.py`` says it in words.

A medium that comes later is added to MEDIA; if it passes here, nothing else need change.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ipc.device.worlds import WORLDS
from tests.ipc.memory import memory
from tests.ipc.socket_medium import SocketMedium
from trserve.ipc.baton import MAX_HOP
from trserve.ipc.doorbell import ring, silence
from trserve.ipc.layout import Layout
from trserve.ipc.links import Medium, ShmMedium, receivers, senders
from trserve.ipc.rings import Descriptor, Kind

LAYOUT = Layout(slots=4, row_tokens=16, workers=2)
GATEWAY = LAYOUT.gateway


@contextmanager
def shm() -> Iterator[Medium]:
    with memory(slots=4, row_tokens=16) as made:
        yield ShmMedium(made.slab())


@contextmanager
def sockets() -> Iterator[Medium]:
    medium = SocketMedium(LAYOUT, buffer_bytes=4096)
    try:
        yield medium
    finally:
        medium.close()


MEDIA = {"shm": shm, "sockets": sockets, **WORLDS}
DESCRIPTORS = st.builds(
    Descriptor,
    st.sampled_from(Kind),
    st.integers(0, 2**24 - 1),
    st.integers(0, 2**63 - 1),
    st.integers(0, MAX_HOP),
)


@pytest.fixture(params=MEDIA)
def medium(request):
    with MEDIA[request.param]() as made:
        yield made


def some(count, first=0):
    return [Descriptor(Kind.RUN, n % 4, first + n, n) for n in range(count)]


@pytest.mark.parametrize("name", MEDIA)
@settings(max_examples=60, deadline=None)
@given(pushes=st.lists(st.lists(DESCRIPTORS, min_size=1, max_size=4), max_size=12))
def test_what_is_pushed_arrives_as_it_is_and_in_order(name, pushes):
    with MEDIA[name]() as medium:
        sender, receiver = medium.sender(GATEWAY, 0), medium.receiver(GATEWAY, 0)
        for descriptors in pushes:
            assert sender.push(descriptors)
            assert list(receiver.drain()) == descriptors
        assert not receiver.drain()
        assert not receiver.overflowed()


def test_several_pushes_are_drained_together(medium):
    sender, receiver = medium.sender(1, 0), medium.receiver(1, 0)
    assert sender.push(some(3)) and sender.push(some(2, first=10))
    assert list(receiver.drain()) == some(3) + some(2, first=10)


def test_a_full_link_takes_nothing_says_so_once_and_works_again(medium):
    sender, receiver = medium.sender(1, 0), medium.receiver(1, 0)
    taken = 0
    while sender.push(some(3, first=3 * taken)):
        taken += 1
        assert taken < 10_000, "it is never full"
    assert not sender.push(some(3))
    assert receiver.overflowed()
    assert not receiver.overflowed()
    found = list(receiver.drain())
    assert [d.gen for d in found] == list(range(3 * taken)), "part of a push, or none of one"
    assert sender.push(some(2))
    assert list(receiver.drain()) == some(2)
    assert not receiver.overflowed()


def test_links_do_not_mix(medium):
    for producer, ends in ((GATEWAY, (0, 1)), (0, (1,)), (1, (0,))):
        made = senders(medium, LAYOUT, producer)
        assert tuple(made) == ends
        for consumer, sender in made.items():
            assert sender.push([Descriptor(Kind.RUN, consumer, producer, 0)])
    for consumer in (0, 1):
        found = [list(receiver.drain()) for receiver in receivers(medium, LAYOUT, consumer)]
        producers = [producer for producer in (0, 1, GATEWAY) if producer != consumer]
        assert found == [[Descriptor(Kind.RUN, consumer, p, 0)] for p in producers]


@pytest.mark.parametrize("end", ["sender", "receiver"])
def test_a_successor_takes_an_end_over(medium, end):
    sender, receiver = medium.sender(0, 1), medium.receiver(0, 1)
    assert sender.push(some(2))
    assert list(receiver.drain()) == some(2)
    assert sender.push(some(1, first=5))
    if end == "sender":
        sender = medium.sender(0, 1)
    else:
        receiver = medium.receiver(0, 1)
    assert sender.push(some(1, first=6))
    assert [d.gen for d in receiver.drain()] == [5, 6]


def test_between_processes(medium):
    """Ten thousand descriptors, in order, with nothing but the doorbell to wait for."""
    total, bell = 10_000, os.eventfd(0, os.EFD_NONBLOCK)
    child = os.fork()
    if not child:
        sender, sent = medium.sender(1, 0), 0
        while sent < total:
            if sender.push(some(min(3, total - sent), first=sent)):
                sent += min(3, total - sent)
            ring(bell)
        os._exit(0)
    receiver, found = medium.receiver(1, 0), []
    while len(found) < total:
        silence(bell)
        found += [descriptor.gen for descriptor in receiver.drain()]
    assert os.waitpid(child, 0) == (child, 0)
    assert found == list(range(total))
    os.close(bell)
