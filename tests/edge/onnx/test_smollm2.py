"""A published model (SmolLM2-135M) on ONNX Runtime, against what transformers computed."""

import numpy as np
import pytest
import torch

from tests.edge.onnx.exporting import require_runtime
from tests.realmodel.conftest import gguf  # noqa: F401 (a fixture)
from tests.realmodel.smollm2 import MESSAGES, TEXTS
from tests.realmodel.test_smollm2 import TOLERANCE, Reference
from trserve.gateway.tokenizer import Tokenizer
from trserve.models.aliases import resolve_model
from trserve.workers.step import StepInputs

require_runtime()

from trserve.edge.onnx.export import export  # noqa: E402
from trserve.edge.onnx.runner import OnnxRunner  # noqa: E402

pytestmark = [pytest.mark.realmodel, pytest.mark.slow]

CAPACITY = 256


def test_an_exported_gguf_file_computes_what_transformers_computes(gguf, tmp_path):  # noqa: F811
    """Prompts at once, then token by token, each row beside the others."""
    difference = export(resolve_model(str(gguf)), tmp_path)
    assert difference.largest < TOLERANCE
    model, reference = resolve_model(str(tmp_path)), Reference()
    runner = OnnxRunner(
        tmp_path,
        model.spec,
        rows=3,
        capacity=CAPACITY,
        max_rows=3,
        threads=1,
        tokenizer_size=model.spec.vocab_size,
    )
    step = StepInputs(max_tokens=512, max_rows=3, max_blocks_per_row=1, block_size=CAPACITY)
    done = [0, 0, 0]
    worst = 0.0
    for ends in (reference.lengths, *([n + i for n in reference.lengths] for i in range(1, 12))):
        step.clear()
        for row, end in enumerate(ends):
            tokens = np.array(reference.tokens[row][done[row] : end])
            step.add_row(tokens, done[row], np.array([row], np.int32))
        done = list(ends)
        out = runner.forward(step)
        for row, end in enumerate(ends):
            if end <= len(reference.logits[row]):
                expected = reference.logits[row][end - 1]
                found = out.logits[row][reference.columns]
                worst = max(worst, (found - expected).abs().max().item())
            if end < len(reference.tokens[row]):
                assert int(torch.argmax(out.logits[row])) == reference.tokens[row][end]
    assert 0 < worst < TOLERANCE


def test_its_tokenizer_came_along(gguf, tmp_path):  # noqa: F811
    from trserve.edge.onnx.copying import copy_beside

    model = resolve_model(str(gguf))
    copy_beside(model, tmp_path)
    ours, theirs = Tokenizer.load(tmp_path), Tokenizer.load(model.tokenizer_path)
    assert ours.fingerprint() == theirs.fingerprint()
    assert set(ours.eos_token_ids) == set(theirs.eos_token_ids)
    for text in TEXTS:
        assert ours.encode(text, add_special_tokens=True) == theirs.encode(
            text, add_special_tokens=True
        )
    rendered = [each.render_chat(MESSAGES, add_generation_prompt=True) for each in (ours, theirs)]
    assert rendered[0] == rendered[1]
