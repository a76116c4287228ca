"""The GPU's runner emulated on the CPU: through buckets, padding and packing it says what the CPU's
runner, sampler and routing say, token for token and destination for destination."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.models.reference import make_model, save
from tests.workers.cuda.harness import ALL, MAX_ROWS, Beside, Row, router_of

FILTERS = (
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 0.9, "min_p": 0.1},
    {"temperature": 1.1, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save(make_model("qwen3"), tmp_path_factory.mktemp("model"))


def go(beside: Beside, steps: int) -> set[int]:
    """Random steps: prompts in chunks, suffixes, decodes, in batches that change."""
    rng, rows, seen = beside.rng, [], set()
    for _ in range(steps):
        while not rows or (len(rows) < MAX_ROWS and rng.random() < 0.5):
            length = int(rng.integers(1, 30))
            rows.append(beside.row(length, **FILTERS[int(rng.integers(len(FILTERS)))]))
        chosen: list[Row] = [row for row in rows if rng.random() < 0.8] or rows[:1]
        room, counts = 60, []
        for row in chosen:
            left = len(row.tokens) - row.computed
            counts.append(max(1, min(left, int(rng.integers(1, 12)), room - len(chosen))))
            room -= counts[-1]
        tokens, destinations = beside.check(chosen, counts)
        for row, token, destination in zip(chosen, tokens, destinations, strict=True):
            if row.computed == len(row.tokens):
                row.tokens.append(int(token))
                seen.add(destination)
                if rng.random() < 0.3:  # others wrote some more
                    row.tokens += rng.integers(0, 90, int(rng.integers(1, 8))).tolist()
            if len(row.tokens) > 50:
                rows.remove(row)
                beside._free += row.table.tolist()
    return seen


@pytest.mark.parametrize("seed", range(2))
def test_random_steps_are_the_cpus(path, seed, full):
    router = router_of("r-stitch", tau=0.5)
    beside = Beside(path, router, seed=seed)
    assert go(beside, 200 if full else 40) == {0, 1}
