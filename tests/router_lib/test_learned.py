"""The learned routers against their formulas in float64, and checkpoints that do not fit."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.router_lib import networks
from trserve.errors import ConfigError
from trserve.router_lib.base import BaseRouter, RouterContext, StepResult
from trserve.router_lib.co_llm import CoLLM
from trserve.router_lib.confidence import Citer, Confidence
from trserve.router_lib.r2r import R2R
from trserve.workers.routing import Routing, create_router

HIDDEN, SIZE, PADDED, BATCH = 24, 50, 56, 9
DEFAULT = networks.R2R_CLASSES[0]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a learned router reads of its model: the configuration and the input embedding."""
    path = tmp_path_factory.mktemp("model")
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": PADDED,
        "hidden_size": HIDDEN,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
    }
    (path / "config.json").write_text(json.dumps(config))
    save_file({"model.embed_tokens.weight": embedding()}, path / "model.safetensors")
    return path


def embedding() -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(PADDED, HIDDEN, generator=generator).to(torch.bfloat16)


def step(**params: float) -> StepResult:
    generator = torch.Generator().manual_seed(3)
    logits = 4 * torch.randn(BATCH, PADDED, generator=generator)
    logits[:, SIZE:] = -math.inf
    requests: Any = [SimpleNamespace(extras=b"", committed_len=3, prompt_len=2)] * BATCH
    params = {"hysteresis": 0.0, "visit_tokens": 1.0, "warm_up": 0.0, **params}
    return StepResult(
        logits=logits,
        hidden=torch.randn(BATCH, HIDDEN, generator=generator).to(torch.bfloat16),
        token_ids=logits.argmax(-1),
        params={name: torch.full((BATCH,), value) for name, value in params.items()},
        requests=requests,
        is_prefill=torch.zeros(BATCH, dtype=torch.bool),
    )


def make(router: type[BaseRouter], checkpoint: Path, model: Path, **config: Any) -> Any:
    values = {"checkpoint": str(checkpoint), "model": str(model), **config}
    return router(RouterContext(0, ("small", "large"), SIZE, values))


def check(router: Any, parameter: str, expected: list[float], above: bool) -> None:
    """The score is ``expected``; the row at which the threshold stands shows which side counts."""
    assert router.score(step()).tolist() == pytest.approx(expected, abs=1e-5)
    threshold = float(router.score(step()).median())  # as float32 holds it
    routed = router.route(step(**{parameter: threshold})).tolist()
    for row, value in enumerate(router.score(step()).tolist()):
        if value == threshold:
            assert routed[row] == int(router.inclusive)
        else:
            assert routed[row] == int((value > threshold) is above)
    assert 0 < sum(routed) < BATCH


@pytest.mark.parametrize("name", networks.R2R_CLASSES)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("dims", [(32, 32), (16, 40, 8)])
@pytest.mark.parametrize("form", ["pt", "all.pt", "safetensors"])
def test_r2r_is_its_formula(
    tmp_path: Path, model: Path, name: str, normalize: bool, dims: tuple[int, ...], form: str
) -> None:
    vocab = PADDED if form == "all.pt" else None
    tensors = networks.r2r_tensors(name, HIDDEN, dims, vocab=vocab, normalize=normalize)
    stated = networks.r2r_file(name, tensors, threshold=0.4, normalize=normalize)
    file = tmp_path / f"router.{form}"
    if form == "safetensors":
        save_file(tensors, file)
        facts = {"model_type": name, "threshold": 0.4}
        facts["init_args"] = {"normalize_input": normalize}
        file.with_suffix(".json").write_text(json.dumps(facts))
    else:
        torch.save(stated, file)
    router = make(R2R, file, model, threshold=-1.0)
    result = step()
    expected = [
        networks.r2r_probability(
            name,
            tensors,
            result.hidden[row],
            int(result.token_ids[row]),
            result.logits[row, :SIZE],
            embedding(),
            normalize=normalize,
        )
        for row in range(BATCH)
    ]
    check(router, "threshold", expected, above=True)
    assert router.context.config["threshold"] == 0.4


@pytest.mark.parametrize(("router", "parameter"), [(Citer, "tau"), (Confidence, "threshold")])
@pytest.mark.parametrize("form", ["pth", "safetensors"])
def test_confidence_is_its_formula(
    tmp_path: Path, model: Path, router: type[BaseRouter], parameter: str, form: str
) -> None:
    tensors = networks.confidence_tensors(HIDDEN)
    file = tmp_path / f"mlp_iter_1234.{form}"
    save_file(tensors, file) if form == "safetensors" else torch.save(tensors, file)
    hidden = step().hidden
    expected = [networks.confidence_probability(tensors, row) for row in hidden]
    check(make(router, file, model), parameter, expected, above=False)


def test_the_edge_systems_network_reads_what_the_last_mlp_reads(
    tmp_path: Path, model: Path
) -> None:
    file, tensors = tmp_path / "mlp.pth", networks.confidence_tensors(HIDDEN)
    torch.save(tensors, file)
    router = make(Confidence, file, model, tap="pre-mlp")
    assert router.reads_tap and not make(Confidence, file, model, tap="final").reads_tap
    result = step()
    result.tap = torch.randn(BATCH, HIDDEN, generator=torch.Generator().manual_seed(8))
    expected = [networks.confidence_probability(tensors, row) for row in result.tap]
    assert router.score(result).tolist() == pytest.approx(expected, abs=1e-5)
    assert router.score(result.row(4)).tolist() == pytest.approx(expected[4:5], abs=1e-5)


@pytest.mark.parametrize("there", [True, False])
def test_r2r_takes_the_loaded_models_embedding_unless_another_is_named(
    tmp_path: Path, model: Path, there: bool
) -> None:
    """Weights drawn at random, or of a GGUF file, are in no safetensors file."""
    file = saved(tmp_path, networks.r2r_file(DEFAULT, networks.r2r_tensors(DEFAULT, HIDDEN)))
    loaded = -embedding().float()
    if not there:
        (model / "model.safetensors").rename(tmp_path / "away")
    values = {"checkpoint": str(file), "model": str(model), "threshold": 0.5}
    names = ("small", "large")
    try:
        own = R2R(RouterContext(0, names, SIZE, values, path=str(model), embedding=loaded))
        if there:
            other = R2R(RouterContext(0, names, SIZE, values, path="/other", embedding=loaded))
    finally:
        if not there:
            (tmp_path / "away").rename(model / "model.safetensors")
    result = step()
    given = [DEFAULT, networks.r2r_tensors(DEFAULT, HIDDEN)]
    rows = [
        (result.hidden[row], int(result.token_ids[row]), result.logits[row, :SIZE])
        for row in range(BATCH)
    ]
    expected = [networks.r2r_probability(*given, *row, loaded) for row in rows]
    assert own.score(result).tolist() == pytest.approx(expected, abs=1e-5)
    if there:
        expected = [networks.r2r_probability(*given, *row, embedding()) for row in rows]
        assert other.score(result).tolist() == pytest.approx(expected, abs=1e-5)


def deferring_folder(folder: Path, vector: torch.Tensor, *, tied: bool, form: str) -> None:
    """A fine-tuned model: two rows more than the tokenizer, and some padding behind them."""
    head = torch.randn(SIZE + 6, HIDDEN, generator=torch.Generator().manual_seed(9))
    head[SIZE + 1] = vector[0]
    tensors = {"model.embed_tokens.weight": head if tied else torch.zeros_like(head)}
    if not tied:
        tensors["lm_head.weight"] = head.clone()
    if form == "safetensors":
        save_file(tensors, folder / "model.safetensors")
    else:
        torch.save(tensors, folder / "pytorch_model.bin")
    added = [{"id": SIZE, "content": "<pad>"}, {"id": SIZE + 1, "content": "<|defer|>"}]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))


@pytest.mark.parametrize("form", ["bin", "flat.bin", "safetensors", "folder", "tied", "old folder"])
def test_co_llm_is_its_formula(tmp_path: Path, model: Path, form: str) -> None:
    vector, place = networks.defer_vector(HIDDEN), tmp_path / f"vector.{form}"
    if form.endswith("bin"):
        torch.save(vector[0] if "flat" in form else vector, place)
    elif form == "safetensors":
        save_file({"defer": vector}, place)
    else:
        place.mkdir()
        kind = "bin" if form == "old folder" else "safetensors"
        deferring_folder(place, vector, tied=form == "tied", form=kind)
    expected = [networks.defer_probability(vector, row) for row in step().hidden]
    check(make(CoLLM, place, model), "eta", expected, above=True)


def test_co_llm_defers_less_while_an_answer_warms_up(tmp_path: Path, model: Path) -> None:
    """eta is 1 at the first token and falls in a line; a request without a warm-up has its own."""
    vector = networks.defer_vector(HIDDEN)
    torch.save(vector, tmp_path / "vector.bin")
    router = make(CoLLM, tmp_path / "vector.bin", model)
    result = step(eta=0.2, warm_up=8.0)
    written = [0, 1, 2, 4, 6, 7, 8, 30, 0]
    result.requests = [
        SimpleNamespace(extras=b"", committed_len=5 + n, prompt_len=5) for n in written
    ]
    result.params["warm_up"][-1] = 0.0
    expected = [1.0, 0.9, 0.8, 0.6, 0.4, 0.3, 0.2, 0.2, 0.2]
    assert router.limits(result.params, result.requests).tolist() == pytest.approx(expected)
    scores = router.score(result).tolist()
    routed = [int(score > limit) for score, limit in zip(scores, expected, strict=True)]
    assert router.route(result).tolist() == routed
    assert routed != router.route(step(eta=0.2)).tolist(), "the warm-up keeps some of them"


def test_only_the_first_models_worker_loads_anything(tmp_path: Path) -> None:
    for router in (R2R, Citer, Confidence, CoLLM):
        values = {"checkpoint": str(tmp_path / "none"), "model": str(tmp_path), "threshold": -1.0}
        other = router(RouterContext(1, ("small", "large"), SIZE, values))
        assert other.route(step()) == [1] * BATCH
        assert other.score(step()) is None


def saved(folder: Path, stated: object) -> Path:
    torch.save(stated, folder / "router.pt")
    return folder / "router.pt"


def test_a_threshold_that_was_given_wins_and_that_is_said(
    tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = networks.r2r_tensors(DEFAULT, HIDDEN)
    file = saved(tmp_path, networks.r2r_file(DEFAULT, tensors, threshold=0.4))
    caplog.set_level(logging.INFO)
    assert make(R2R, tmp_path, model, threshold=0.7).context.config["threshold"] == 0.7
    assert f"threshold 0.7 overrides 0.4 of {file}" in caplog.text
    stored = make(R2R, tmp_path, model, threshold=-1.0)
    assert "threshold 0.4, as" in caplog.text
    assert stored.parameters[0].default == 0.4
    without = networks.r2r_file(DEFAULT, tensors, threshold=None)
    with pytest.raises(ConfigError, match="states no threshold: give --router-config threshold="):
        make(R2R, saved(tmp_path, without), model, threshold=-1.0)
    assert make(R2R, file, model, threshold=0.3).context.config["threshold"] == 0.3


def test_what_stands_for_the_stored_threshold_is_none_that_a_request_may_send(
    tmp_path: Path, model: Path
) -> None:
    tensors = networks.r2r_tensors(DEFAULT, HIDDEN)
    saved(tmp_path, networks.r2r_file(DEFAULT, tensors, threshold=0.4))
    for threshold, default in ((-1.0, 0.4), (0.7, 0.7)):
        first = make(R2R, tmp_path, model, threshold=threshold).parameters[0]
        assert first.default == default
        assert first.problem(-1.0) == "threshold = -1 is outside 0 to 1"


def test_requests_without_a_threshold_get_the_stored_one(tmp_path: Path, model: Path) -> None:
    tensors = networks.r2r_tensors(DEFAULT, HIDDEN)
    file = saved(tmp_path, networks.r2r_file(DEFAULT, tensors, threshold=0.375))
    config = {"checkpoint": str(file), "model": str(model)}
    routing = Routing(create_router("r2r", RouterContext(0, ("a", "b"), SIZE, config)))
    requests: Any = [
        SimpleNamespace(params=SimpleNamespace(router=own)) for own in ({}, {"threshold": 0.5})
    ]
    assert routing.parameter_tensors(requests)["threshold"].tolist() == [0.375, 0.5]
    described = {each["name"]: each for each in routing.describe()}
    assert set(described) == {"threshold", "hysteresis", "visit_tokens"}
    assert described["threshold"]["default"] == 0.375


def broken_r2r(change: str) -> dict[str, Any]:
    tensors = networks.r2r_tensors(DEFAULT, HIDDEN, vocab=PADDED)
    stated = networks.r2r_file(DEFAULT, tensors)
    match change:
        case "class":
            stated["model_type"] = "MultiLogitsClassifier"
        case "missing":
            del tensors["backbone.blocks.1.layer_norm.bias"]
        case "shape":
            tensors["backbone.blocks.0.mlp.3.weight"] = torch.zeros(32, 7)
        case "classes":
            tensors |= networks.linear(torch.Generator(), "backbone.output_layer.1", 3, 32)
        case "positions":
            tensors["backbone.position_embedding"] = torch.zeros(4, 32)
        case "hidden":
            stated = networks.r2r_file(DEFAULT, networks.r2r_tensors(DEFAULT, 16))
        case "embedding":
            tensors["token_embeddings.weight"] = torch.zeros(SIZE - 1, HIDDEN)
        case "logits":
            tensors["logits_projection.weight"] = torch.zeros(HIDDEN, SIZE + 1)
        case "threshold":
            stated["common_args"]["threshold"] = 40.0
    return stated


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("class", "its model_type is 'MultiLogitsClassifier'; of R2R's classes these are known"),
        ("missing", r"lacks the tensor backbone.blocks.1.layer_norm.bias"),
        ("shape", r"backbone.blocks.0.mlp.3.weight has the shape \[32, 7\], expected \[32, 128\]"),
        ("classes", r"backbone.output_layer.1.weight has the shape \[3, 32\], expected \[1, 32\]"),
        ("positions", "tensors that a .* does not have: backbone.position_embedding"),
        ("hidden", r"made for hidden states of size 16, but small .* has 24"),
        ("embedding", r"shape \[49, 24\], expected \[at least 50, 24\]"),
        ("logits", "reads the 51 largest logits; the tokenizer has 50 ids"),
        ("threshold", "its threshold is 40.0, expected a number from 0 to 1"),
    ],
)
def test_an_r2r_file_that_does_not_fit_says_where(
    tmp_path: Path, model: Path, change: str, message: str
) -> None:
    file = saved(tmp_path, broken_r2r(change))
    with pytest.raises(ConfigError, match=message) as raised:
        make(R2R, file, model, threshold=-1.0)
    assert str(file) in str(raised.value)


def test_r2r_says_what_to_do_without_an_embedding(tmp_path: Path, model: Path) -> None:
    tensors = networks.r2r_tensors(DEFAULT, HIDDEN)
    file = saved(tmp_path, networks.r2r_file(DEFAULT, tensors))
    bare = tmp_path / "bare.json"
    bare.write_text((model / "config.json").read_text())
    with pytest.raises(ConfigError, match=r"model=.*bare.json.*token_embeddings.weight"):
        make(R2R, file, bare, threshold=-1.0)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("mlp.1.running_var", None, "lacks the tensor mlp.1.running_var"),
        ("mlp.4.weight", torch.zeros(24, 24), r"mlp.4.weight has .*expected \[24, 48\]"),
        ("mlp.7.weight", torch.zeros(1), "tensors that a confidence network does not have: mlp.7"),
    ],
)
def test_a_confidence_file_that_does_not_fit_says_where(
    tmp_path: Path, model: Path, name: str, value: torch.Tensor | None, message: str
) -> None:
    tensors = networks.confidence_tensors(HIDDEN) | {name: value}
    kept = {key: tensor for key, tensor in tensors.items() if tensor is not None}
    with pytest.raises(ConfigError, match=message):
        make(Citer, saved(tmp_path, kept), model)


def test_files_for_another_model_are_refused(tmp_path: Path, model: Path) -> None:
    with pytest.raises(ConfigError, match=r"hidden states of size 16, but small .* has 24"):
        make(Citer, saved(tmp_path, networks.confidence_tensors(16)), model)
    with pytest.raises(ConfigError, match=r"hidden states of size 16, but small .* has 24"):
        make(CoLLM, saved(tmp_path, networks.defer_vector(16)), model)


def test_a_co_llm_folder_without_a_row_that_can_be_used_is_refused(
    tmp_path: Path, model: Path
) -> None:
    with pytest.raises(ConfigError, match=r"neither tokenizer.json nor added_tokens.json"):
        make(CoLLM, tmp_path, model)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|defer|>": SIZE + 1}))
    with pytest.raises(ConfigError, match=r"no file there holds lm_head.weight"):
        make(CoLLM, tmp_path, model)
    save_file({"lm_head.weight": torch.zeros(SIZE, HIDDEN)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"has 50 rows, and row 51 is asked for"):
        make(CoLLM, tmp_path, model)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|defer|>": SIZE - 1}))
    with pytest.raises(ConfigError, match=r"is id 49 of the 50 ids .* could be sampled"):
        make(CoLLM, tmp_path, model)


@pytest.mark.parametrize(
    "content", [{"a": torch.zeros(HIDDEN)}, 3, torch.zeros(2, HIDDEN), torch.tensor(1.0)]
)
def test_a_co_llm_file_holds_one_vector(tmp_path: Path, model: Path, content: object) -> None:
    with pytest.raises(ConfigError, match="expected"):
        make(CoLLM, saved(tmp_path, content), model)
