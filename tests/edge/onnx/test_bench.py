"""The benchmark's rows; its numbers are for a quiet machine."""

import pytest

from tests.edge.onnx.exporting import require_runtime

require_runtime()

from bench.onnx_decode import CONTEXTS, measure  # noqa: E402

KEYS = {"model", "engine", "threads", "context", "ms", "best_ms", "append_ms", "prompt_ms"}


@pytest.mark.parametrize("engine", ["onnx", "kernels"])
def test_a_row_for_each_context(engine):
    rows = measure("tiny", engine, 1, 2)
    if engine == "kernels" and not rows:
        pytest.skip("the compiled kernels cannot be had here")
    assert [row["context"] for row in rows] == list(CONTEXTS)
    for row in rows:
        assert set(row) >= KEYS
        assert 0 < row["best_ms"] <= row["ms"]
        assert (engine == "onnx") == ("logit_difference" in row)
