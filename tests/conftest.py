"""What all tests share: one thread for torch, no network, and the two tiers of counts.

The usual tier is what `make test` runs; TRSERVE_FULL=1 (`make test-all`) runs full counts and the
tests marked slow.
"""

import os

# Before anything imports torch: afterwards it is too late.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import hypothesis
import pytest

FULL = os.environ.get("TRSERVE_FULL") == "1"

hypothesis.settings.register_profile("usual", max_examples=25, deadline=None)
hypothesis.settings.register_profile("full", max_examples=500, deadline=None)
hypothesis.settings.load_profile("full" if FULL else "usual")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if FULL:
        return
    skip = pytest.mark.skip(reason="full counts only (TRSERVE_FULL=1, make test-all)")
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def full() -> bool:
    """Whether full counts are wanted."""
    return FULL


def pytest_terminal_summary(terminalreporter):
    """How many tests of this run wait for a device, as a line of its own."""
    skipped = terminalreporter.stats.get("skipped", [])
    waiting = sum("device" in str(report.longrepr[2]) for report in skipped)
    if waiting:
        terminalreporter.write_line(f"gpu: SKIPPED {waiting} tests (no device)")
