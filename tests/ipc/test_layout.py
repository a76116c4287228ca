"""Layout and slab: nothing overlaps, words are aligned, and two versions never share a slab."""

from __future__ import annotations

import itertools
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ipc.memory import memory
from trserve.errors import StartupError
from trserve.ipc import slab as slab_module
from trserve.ipc.layout import HEADER_WORDS, PARAMS_BYTES, Layout
from trserve.ipc.slab import Slab, create_slab_file

LAYOUTS = st.builds(
    Layout,
    slots=st.integers(1, 300),
    row_tokens=st.integers(1, 3000),
    workers=st.integers(1, 6),
)


@given(LAYOUTS)
def test_fields_are_aligned_and_apart(layout: Layout) -> None:
    end = 0
    for offset, size in layout.regions.values():
        assert offset % 64 == 0
        assert offset >= end
        assert size > 0
        end = offset + size
    assert end <= layout.size


@given(LAYOUTS)
def test_every_pair_has_a_ring_of_its_own(layout: Layout) -> None:
    everyone = range(layout.workers + 1)
    offsets = sorted(
        layout.ring_offset(producer, consumer)
        for producer in everyone
        for consumer in range(layout.workers)
    )
    assert all(b - a >= layout.ring_bytes for a, b in itertools.pairwise(offsets))
    assert offsets[-1] + layout.ring_bytes <= layout.size
    assert layout.ring_capacity >= 2 * layout.slots


@given(LAYOUTS)
def test_every_process_has_events_of_its_own(layout: Layout) -> None:
    offsets = [layout.trace_offset(process) for process in range(layout.workers + 1)]
    assert all(b - a >= layout.trace_bytes for a, b in itertools.pairwise(offsets))
    assert offsets[0] == layout.regions["traces"].offset
    assert offsets[-1] + layout.trace_bytes <= layout.size


@given(LAYOUTS)
def test_a_header_tells_its_layout(layout: Layout) -> None:
    header = layout.header()
    words = [*header, *[0] * (HEADER_WORDS - len(header))]
    assert Layout.from_header(words) == layout
    for at in (0, 1, 5):  # magic, version, size
        assert Layout.from_header([*words[:at], words[at] + 1, *words[at + 1 :]]) is None
    assert Layout.from_header([]) is None


def test_words_of_one_field_do_not_show_in_another() -> None:
    with memory(slots=3, row_tokens=10, workers=2) as shared:
        slab = shared.slab()
        words = [slab.baton, slab.gen, slab.cancel, slab.sent, slab.prompt_len, slab.limit]
        words += [slab.cached, slab.suspect]
        words += slab.closed
        words += slab.left
        for at, field in enumerate(words):
            for slot in range(3):
                field[slot] = 1000 + 10 * at + slot
        slab.tokens[:] = np.arange(30).reshape(3, 10)
        slab.source[:] = 7
        for worker, in_step in enumerate(slab.in_step):
            in_step[:] = 100 * worker + np.arange(4)
        for slot in range(3):
            slab.write_params(slot, bytes([slot]) * (PARAMS_BYTES - slot))
            for bank in range(2):
                slab.extras(slot, bank)[:] = bytes([16 * slot + bank]) * 80
        other = shared.slab()
        assert [list(field) for field in words] == [
            [1000 + 10 * at + slot for slot in range(3)] for at in range(len(words))
        ]
        assert [words.tolist() for words in other.in_step] == [[0, 1, 2, 3], [100, 101, 102, 103]]
        assert other.tokens.tolist() == np.arange(30).reshape(3, 10).tolist()
        for slot in range(3):
            assert bytes(other.params(slot)) == bytes([slot]) * (PARAMS_BYTES - slot)
            assert bytes(other.extras(slot, 1)) == bytes([16 * slot + 1]) * 80


def test_worker_lines_are_apart() -> None:
    with memory(workers=3) as shared:
        slab = shared.slab()
        for worker in range(3):
            slab.workers[worker].set("steps", worker + 1)
        assert [words.get("steps") for words in shared.slab().workers] == [1, 2, 3]
        assert [words.get("status") for words in shared.slab().workers] == [0, 0, 0]


def test_the_epoch_is_beside_what_tells_the_layout() -> None:
    with memory() as shared:
        assert shared.slab().epoch == 0
        shared.slab().epoch += 1
        assert shared.slab().epoch == 1  # and the header is still this layout's


@pytest.mark.parametrize(
    "other", [Layout(5, 64, 2), Layout(4, 65, 2), Layout(4, 64, 3), Layout(4, 640, 2)]
)
def test_another_layout_is_refused(other: Layout) -> None:
    with (
        memory(slots=4, row_tokens=64, workers=2) as shared,
        pytest.raises(StartupError, match="different versions"),
    ):
        Slab(shared.fd, other)


def test_a_slab_without_header_is_refused() -> None:
    layout = Layout(4, 64, 2)
    fd = create_slab_file(layout)
    try:
        with pytest.raises(StartupError, match="header"):
            Slab(fd, layout)
    finally:
        os.close(fd)


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with memory() as shared:
        shared.slab().header[1] += 1
        with pytest.raises(StartupError, match="header"):
            shared.slab()


def test_the_file_keeps_its_size() -> None:
    with memory() as shared, pytest.raises(PermissionError):
        os.ftruncate(shared.fd, shared.layout.size // 2)


def test_a_slab_that_memory_cannot_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slab_module, "available_memory", lambda: 2**20)
    with pytest.raises(StartupError, match="--max-requests"):
        create_slab_file(Layout(4096, 4096, 2))
