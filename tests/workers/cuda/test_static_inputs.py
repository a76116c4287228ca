"""What the device reads of a step: its rows, and padding that changes nothing."""

from __future__ import annotations

import numpy as np
import torch

from trserve.workers.cuda.buckets import Bucket
from trserve.workers.cuda.static_inputs import NOWHERE, StaticInputs
from trserve.workers.sampler import RowSampling
from trserve.workers.step import StepInputs

TABLE = np.array([5, 3], np.int32)


def inputs_of() -> StaticInputs:
    return StaticInputs(torch.device("cpu"), max_rows=4, max_tokens=16)


def step_of(rows: list[tuple[list[int], int]]) -> StepInputs:
    step = StepInputs(max_tokens=16, max_rows=4, max_blocks_per_row=2, block_size=8)
    for ids, start in rows:
        step.add_row(np.array(ids), start, TABLE)
    return step


def sampling(count: int) -> RowSampling:
    return RowSampling(
        temperatures=np.full(count, 0.5),
        top_k=np.full(count, 3),
        top_p=np.full(count, 0.25),
        min_p=np.full(count, 0.125),
        seeds=np.full(count, 2**63 + 5, np.uint64),
        positions=np.arange(10, 10 + count),
    )


def test_rows_that_are_missing_are_padding():
    inputs = inputs_of()
    views = inputs.tokens(4)
    views.host[:] = 99  # what an earlier step has left
    inputs.fill(views, step_of([([7], 2), ([8], 9)]), Bucket(4, 1))
    views.copy()
    assert views.device.ids.tolist() == [7, 8, 0, 0]
    assert views.device.positions.tolist() == [2, 9, 0, 0]
    assert views.device.slots.tolist() == [42, 25, NOWHERE, NOWHERE]


def test_a_short_row_is_led_by_what_its_cache_has():
    """The leading tokens lie at the row's own positions, and are stored nowhere."""
    inputs = inputs_of()
    views = inputs.tokens(12)
    views.host[:] = 99
    inputs.fill(views, step_of([([1, 2, 3], 6), ([4], 9)]), Bucket(3, 4))
    views.copy()
    assert views.device.ids.tolist() == [0, 1, 2, 3, 0, 0, 0, 4, 0, 0, 0, 0]
    assert views.device.positions.tolist() == [5, 6, 7, 8, 6, 7, 8, 9, 0, 0, 0, 0]
    slots = views.device.slots.tolist()
    assert slots == [-1, 46, 47, 24, -1, -1, -1, 25, -1, -1, -1, -1]


def test_rows_say_how_they_draw_and_padding_neither_draws_nor_leaves():
    inputs = inputs_of()
    inputs.load(sampling(4), 4)
    inputs.host.bounds[:] = 0.75
    inputs.load(sampling(2), 2)
    inputs.host.bounds[:2] = 0.5
    inputs.tokens(1).copy()
    device = inputs.device
    assert device.temperatures.tolist() == [0.5, 0.5, 0.0, 0.0]
    assert device.top_k.tolist() == [3, 3, 0, 0]
    assert device.top_p.tolist() == [0.25, 0.25, 1.0, 1.0]
    assert device.min_p.tolist() == [0.125, 0.125, 0.0, 0.0]
    assert device.seeds.tolist() == [-(2**63) + 5] * 2 + [0, 0]
    assert device.draw_positions.tolist()[:2] == [10, 11]
    assert device.bounds[:2].tolist() == [0.5, 0.5] and device.bounds[2:].isnan().all()


def test_what_stays_is_not_loaded_again_but_positions_are():
    inputs, rows = inputs_of(), sampling(2)
    inputs.load(rows, 2)
    inputs.host.temperatures[0] = 9.0
    rows.positions = rows.positions + 1
    inputs.load(rows, 2)
    assert inputs.host.temperatures[0] == 9.0
    assert inputs.host.draw_positions[:2].tolist() == [11, 12]


def test_views_of_all_sizes_share_one_memory():
    inputs = inputs_of()
    small, large = inputs.tokens(2), inputs.tokens(16)
    assert small.device.ids.data_ptr() == large.device.ids.data_ptr()
    assert small.source.data_ptr() == large.source.data_ptr()
    assert len(large.source) - len(small.source) == 3 * 14
