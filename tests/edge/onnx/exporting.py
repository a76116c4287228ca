"""Random models and their exports, side by side."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.models.reference import Harness, make_model, save
from trserve.models.aliases import ResolvedModel
from trserve.models.spec import ModelSpec, read_spec
from trserve.workers.step import StepInputs

CASES = {
    "qwen3": {},
    "qwen3-bias-tied": {},
    "qwen2": {"hidden_size": 64},
    "llama-bias": {"head_dim": 16},
    "llama3-rope": {},
    "linear-rope": {},
    "yarn-rope": {},
    "yarn-rope-options": {},
}
"""Cases of ``tests.models.reference``, with heads that the runtime takes."""


@dataclass(frozen=True)
class Exported:
    """A model and the directory that it was exported to."""

    model: ResolvedModel
    directory: Path

    @property
    def spec(self) -> ModelSpec:
        return self.model.spec

    def runner(self, **options):
        from trserve.edge.onnx.runner import OnnxRunner

        given = {
            "rows": 4,
            "capacity": 128,
            "max_rows": 4,
            "threads": 1,
            "tokenizer_size": self.spec.vocab_size,
            **options,
        }
        return OnnxRunner(self.directory, self.spec, **given)


def require_runtime():
    """Skip where ONNX Runtime or the package that writes graphs is missing."""
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed (trserve[edge])")
    pytest.importorskip("onnx", reason="onnx is not installed (trserve[edge])")


def random_model(case: str, folder: Path) -> ResolvedModel:
    path = save(make_model(case, **CASES[case]), folder / "model")
    if case == "yarn-rope":  # queries of three heads, of a size that the runtime takes
        assert json.loads((path / "config.json").read_text())["num_attention_heads"] == 3
    return ResolvedModel(case, path, read_spec(path), path, own_tokenizer=False)


def export_to(model: ResolvedModel, directory: Path, **options):
    from trserve.edge.onnx.export import export

    directory.mkdir()
    return Exported(model, directory), export(model, directory, **options)


class Rows:
    """The same rows on an ONNX runner and on torch's: what each step computes on both."""

    def __init__(self, exported: Exported, **options) -> None:
        self.capacity = options.get("capacity", 128)
        self.ours = exported.runner(**options)
        self.torchs = Harness(exported.model.path)
        self.step = StepInputs(
            max_tokens=512, max_rows=4, max_blocks_per_row=1, block_size=self.capacity
        )
        self.tables = [self.torchs.table(min(self.capacity, 128)) for _ in range(3)]
        self.done = [0, 0, 0]

    def forward(self, tokens: dict[int, list[int]], also=None):
        """The outputs of both, after the next ``tokens`` of some rows."""
        self.step.clear()
        rows = []
        for row, ids in tokens.items():
            self.step.add_row(np.array(ids), self.done[row], np.array([3 - row], np.int32))
            rows.append((ids, self.done[row], self.tables[row]))
            self.done[row] += len(ids)
        return self.ours.forward(self.step, also), self.torchs.forward(rows, also)
