"""A small slab of three workers, for whatever lies in it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from trserve.ipc.layout import Layout
from trserve.ipc.slab import Slab, create_slab_file


@pytest.fixture
def slab() -> Iterator[Slab]:
    layout = Layout(slots=5, row_tokens=16, workers=3)
    fd = create_slab_file(layout)
    yield Slab(fd, layout, create=True)
    os.close(fd)
