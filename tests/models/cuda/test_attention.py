"""Attention over paged caches: plans, padding, and the torch backend against the formula."""

import subprocess
import sys
import types

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models.cuda import batches
from trserve.errors import ConfigError, ModelUnavailableError
from trserve.models.cuda import attention
from trserve.models.cuda.attention import BatchGeometry, PagedLayers, choose_backend
from trserve.models.cuda.attention_plan import PlanArrays, memory_size

RAGGED = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 30)), min_size=1, max_size=5)


def attended(batch: batches.Batch) -> torch.Tensor:
    backend = choose_backend("auto", batch.paged)
    assert backend.name == "torch"
    out = torch.full_like(batch.q, torch.nan)
    backend.plan(batch.geometry)
    backend.run(0, batch.q, out)
    return out


@settings(max_examples=25)
@given(
    rows=RAGGED,
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 8),
    block_size=st.sampled_from([1, 4, 16]),
    seed=st.integers(0, 99),
)
def test_it_is_the_formula_whatever_else_the_cache_holds(rows, kv_heads, group, block_size, seed):
    batch = batches.make(rows, kv_heads=kv_heads, group=group, block_size=block_size, seed=seed)
    torch.testing.assert_close(
        attended(batch).double(), batches.expected(batch), atol=1e-5, rtol=1e-5
    )


@settings(max_examples=15)
@given(
    before=st.lists(st.integers(0, 30), min_size=1, max_size=4),
    width=st.integers(1, 8),
    padding=st.integers(1, 4),
)
def test_padding_rows_are_zero_and_change_nothing(before, width, padding):
    rows = [(width, length) for length in before]
    batch = batches.make(rows, bucket=len(rows) + padding, block_size=4)
    assert batch.geometry.tokens == (len(rows) + padding) * width
    out = attended(batch)
    torch.testing.assert_close(out.double(), batches.expected(batch), atol=1e-5, rtol=1e-5)
    assert out[len(rows) * width :].eq(0).all()


def test_a_nan_stays_in_its_row():
    batch = batches.make([(1, 6), (1, 9)])
    batch.layer[batch.step.block_tables[0, 0]] = torch.nan
    out = attended(batch)
    assert out[0].isnan().all()
    assert out[1].isfinite().all()


@given(rows=RAGGED, padding=st.integers(0, 3), width=st.integers(0, 3))
def test_plans_list_each_rows_blocks_and_the_dummys(rows, padding, width):
    if width:
        rows = [(width, before) for _, before in rows]
    bucket = len(rows) + padding if width else 0
    batch = batches.make(rows, bucket=bucket)
    geometry, paged = batch.geometry, batch.paged
    arrays = PlanArrays(paged, np.zeros(memory_size(paged), np.int32))
    # A larger step before leaves nothing behind.
    arrays.memory[:] = 77
    arrays.fill(geometry)
    assert arrays.rows == max(len(rows), bucket)
    assert arrays.widest == max(width for width, _ in rows)
    assert arrays.used == len(arrays.memory) - paged.max_rows * paged.max_blocks_per_row + len(
        arrays.blocks
    )
    for row in range(arrays.rows):
        start, end = arrays.block_start[row : row + 2].tolist()
        blocks = arrays.blocks[start:end].tolist()
        length = int(arrays.kv_len[row])
        assert length == (end - start - 1) * paged.block_size + arrays.last_block_len[row]
        assert 1 <= arrays.last_block_len[row] <= paged.block_size
        count = int(arrays.query_start[row + 1] - arrays.query_start[row])
        if row < len(rows):
            assert (count, length - count) == rows[row]
            assert blocks == batch.step.block_tables[row, : len(blocks)].tolist()
        else:
            assert count == length == geometry.width
            assert set(blocks) == {paged.dummy}
    assert arrays.query_start[-1] == geometry.tokens


def test_a_plan_may_be_smaller_than_the_one_before():
    large = batches.make([(2, 20), (2, 3), (2, 9)], bucket=4)
    small = batches.make([(1, 2)])
    arrays = PlanArrays(large.paged, np.zeros(memory_size(large.paged), np.int32))
    arrays.fill(large.geometry)
    arrays.fill(small.geometry)
    assert arrays.rows == 1
    assert arrays.kv_len.tolist() == [3]
    assert len(arrays.blocks) == 1


def test_geometry_of_a_step_knows_whether_rows_are_equally_wide():
    assert batches.make([(3, 0), (3, 8)]).geometry.width == 3
    assert batches.make([(3, 0), (2, 8)]).geometry.width == 0
    decodes = BatchGeometry.of(batches.make([(1, 0), (1, 8)]).step, 4)
    assert (decodes.width, decodes.rows, decodes.tokens) == (1, 4, 4)


def paged_layers(device: str, dtype: torch.dtype, dim: int) -> PagedLayers:
    layer = torch.empty(3, 2, 1, 4, dim, dtype=dtype, device=device)
    return PagedLayers([layer], num_heads=2, max_rows=2, max_tokens=8, max_blocks_per_row=2)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("fast", "auto, flashinfer, triton, torch"),
        ("flashinfer", "needs a CUDA device; take auto"),
        ("triton", "needs a CUDA device; take auto or torch"),
    ],
)
def test_what_cannot_run_here_is_refused_in_one_sentence(name, says):
    with pytest.raises(ConfigError, match=says):
        choose_backend(name, paged_layers("cpu", torch.float32, 32))


@pytest.mark.parametrize(
    ("dtype", "dim", "says"),
    [(torch.float32, 64, "not float32"), (torch.bfloat16, 32, "no kernel for heads of 32")],
)
def test_flashinfer_is_not_taken_for_what_it_does_not_know(monkeypatch, dtype, dim, says):
    monkeypatch.setattr(PagedLayers, "device", torch.device("cuda"))
    with pytest.raises(ConfigError, match=says):
        choose_backend("flashinfer", paged_layers("meta", dtype, dim))


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(PagedLayers, "device", torch.device("cuda"))
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ModelUnavailableError, match="pip install --no-deps flashinfer-python"):
        choose_backend("flashinfer", paged_layers("meta", torch.bfloat16, 64))


@pytest.mark.parametrize("usable", [False, True])
def test_auto_takes_flashinfer_only_if_it_can_be_imported(monkeypatch, usable, caplog):
    monkeypatch.setattr(PagedLayers, "device", torch.device("cuda"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "flashinfer", types.ModuleType("stub") if usable else None)
    paged = paged_layers("meta", torch.bfloat16, 64)
    assert attention._resolve("auto", paged) == ("flashinfer" if usable else "triton")
    assert ("flashinfer is installed but not usable" in caplog.text) == (not usable)


IMPORTS = """
import sys
import trserve.models.cuda.ops, trserve.models.cuda.attention, trserve.models.cuda.attention_torch
import trserve.models.cuda.attention_triton, trserve.models.cuda.attention_flashinfer
import torch
x = trserve.models.cuda.ops.rms_norm(torch.ones(1, 4), torch.ones(4), 1e-6)
assert x.shape == (1, 4)
print(sorted({"triton", "flashinfer", "cupy"} & set(sys.modules)))
"""


def test_neither_triton_nor_flashinfer_is_imported_before_it_is_used():
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
