"""The measurement of links: it works on every medium that this machine has."""

from __future__ import annotations

import pytest

from trserve.errors import TrserveError
from trserve.ipc.device.cuda_device import why_unavailable
from trserve.ipc.device.transport import TransportSamples, soak, transport_samples
from trserve.ipc.device.transport_consumer import MEDIA


@pytest.mark.parametrize("medium", MEDIA[:3])
def test_handoffs_are_timed_between_two_processes(medium):
    found = transport_samples(medium, 50)
    assert len(found.descriptor_ns) == len(found.ids_ns) + found.missed == 50
    assert found.missed < 5
    assert all(0 < value < 10**9 for value in found.descriptor_ns)
    summary = found.summary()
    assert summary["medium"] == medium
    assert 0 < summary["ids_p50_us"] <= summary["ids_p99_us"]


@pytest.mark.parametrize("medium", MEDIA[3:5])
@pytest.mark.skipif(bool(why_unavailable()), reason=f"no device: {why_unavailable()}")
def test_handoffs_are_timed_through_a_gpu(medium):
    assert transport_samples(medium, 50).missed < 5


@pytest.mark.parametrize("medium", MEDIA[1:3])
def test_every_id_is_compared_also_after_a_consumer_was_killed(medium, full):
    n = 20_000 if full else 600
    found = soak(medium, n)
    assert found["wrong"] == 0
    assert found["received"] == n - n // 2 - 8
    assert found["taken"] > found["received"] // 2


@pytest.mark.parametrize("medium", MEDIA[3:5])
@pytest.mark.skipif(bool(why_unavailable()), reason=f"no device: {why_unavailable()}")
def test_every_id_is_compared_through_a_gpu(medium):
    assert soak(medium, 600)["wrong"] == 0


def test_what_is_no_medium_is_refused():
    with pytest.raises(TrserveError, match="no medium 'pigeon': shm, "):
        transport_samples("pigeon", 1)


def test_a_summary_without_ids_says_so():
    assert TransportSamples("x", [1000, 3000], [], 2).summary() == {
        "medium": "x",
        "missed": 2,
        "descriptor_p50_us": 2.0,
        "descriptor_p99_us": 2.98,
    }
