"""Nothing that is captured mixes devices: shown with tensors on *meta*, which have no data and
refuse to be used beside those of the CPU, as those of a GPU do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.models.reference import make_model, save
from tests.workers.cuda.harness import router_of
from tests.workers.cuda.test_routers import HIDDEN, learned
from trserve.models.cuda.decoder import CudaDecoder, TokenInputs
from trserve.models.cuda.weights import device_caches, load_onto
from trserve.models.spec import read_spec
from trserve.router_lib.base import BaseRouter, StepResult

META = torch.device("meta")
TOKENS, ROWS = 8, 4


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save(make_model("qwen3-bias-tied"), tmp_path_factory.mktemp("model"))


class Copying:
    """Stands for attention."""

    name = "copying"

    def plan(self, batch: Any) -> None:
        raise AssertionError("nothing is planned here")

    def run(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(q)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_forward_and_its_head(path, dtype):
    spec = read_spec(path)
    loaded = load_onto(META, path, spec, dtype=dtype)
    decoder = CudaDecoder(loaded, max_positions=64)
    decoder.keeps_tap = True
    caches = device_caches(spec, num_blocks=4, block_size=8, dtype=dtype, device=META)
    words = torch.zeros(3, TOKENS, dtype=torch.int64, device=META)
    last = torch.zeros(ROWS, dtype=torch.int64, device=META)
    hidden, tap = decoder.forward(TokenInputs(*words), caches, Copying(), last, lambda: None)
    assert tap is not None
    for found in (hidden, tap):
        assert (found.device, found.dtype) == (META, torch.float32)
        assert found.shape == (ROWS, spec.hidden_size)
    logits = loaded.lm_head(90)(hidden.to(dtype))
    assert logits.device == META and logits.shape == (ROWS, spec.vocab_size)


def score_on_meta(router: BaseRouter) -> torch.Tensor:
    router.to(META)
    score = router.score(
        StepResult(
            logits=torch.zeros(ROWS, 96, device=META),
            hidden=torch.zeros(ROWS, HIDDEN, device=META),
            token_ids=torch.zeros(ROWS, dtype=torch.int64, device=META),
            params={},
            requests=(),
            is_prefill=torch.zeros(ROWS, dtype=torch.bool, device=META),
            tap=torch.zeros(ROWS, HIDDEN, device=META),
        )
    )
    assert score is not None
    return router.crosses(score, torch.zeros(ROWS, dtype=torch.float64, device=META))


@pytest.mark.parametrize("name", ["entropy", "top-prob", "margin", "r-stitch"])
def test_signals(name):
    assert score_on_meta(router_of(name)).device == META


@pytest.mark.parametrize(
    ("name", "threshold"),
    [("r2r", "threshold"), ("citer", "tau"), ("confidence", "threshold"), ("co-llm", "eta")],
)
def test_networks(path, tmp_path, name, threshold):
    crosses = score_on_meta(learned(name, path, tmp_path, **{threshold: 0.5}))
    assert (crosses.device, crosses.dtype) == (META, torch.bool)
