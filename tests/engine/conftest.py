"""One engine over the embedded pair for all tests that do not end it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from trserve import Engine


@pytest.fixture(scope="package")
def embedded() -> Iterator[Engine]:
    with Engine(models=("tiny", "small"), dtype="float32", threads=(1, 1)) as engine:
        yield engine
