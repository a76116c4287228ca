"""From prompts to files with the embedded pair: the command, and the routers that ship with it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from tests.models.gguf_writing import write_gguf
from tests.models.reference import make_model
from trserve import demo
from trserve.cli import main
from trserve.config import config_from_flags
from trserve.errors import ConfigError, RequestError
from trserve.plan import make_plan
from trserve.router_lib.base import RouterContext, StepResult
from trserve.router_lib.registry import load_router_class
from trserve.training.collect import Source
from trserve.training.command import ROUTERS
from trserve.training.demo import demo_prompts

BYTES = 1_000_000


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = [{"messages": p.content, "answer": p.answer} for p in demo_prompts(40, seed=5)]
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


def command(router: str, prompts: Path, out: Path, **flags: Any) -> Any:
    small = {"steps": 10, "hidden-dims": "16,16"}
    own = {"router": router, "prompts": prompts, "out": out, **small, **flags}
    arguments = [part for name, value in own.items() for part in (f"--{name}", str(value))]
    return CliRunner().invoke(main, ["train-router", *arguments])


def step(tokenizer_size: int, hidden: int, **params: float) -> StepResult:
    requests: Any = []
    return StepResult(
        logits=torch.randn(3, tokenizer_size),
        hidden=torch.randn(3, hidden),
        token_ids=torch.tensor([1, 2, 3]),
        params={name: torch.full((3,), value) for name, value in params.items()},
        requests=requests,
        is_prefill=torch.zeros(3, dtype=torch.bool),
    )


def check_serves(router: str, config: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    """The plan takes it, and the router loads it and gives probabilities; returns its values."""
    plan = make_plan(config_from_flags({"router": router, "router_config": config}))
    names = tuple(model.name for model in plan.models)
    context = RouterContext(0, names, plan.tokenizer_size, plan.router_config)
    loaded = load_router_class(router)(context)
    scores = loaded.score(step(plan.tokenizer_size, 96))
    assert scores is not None and scores.shape == (3,)
    assert bool(((scores >= 0) & (scores <= 1)).all())
    return dict(loaded.context.config)


@pytest.mark.parametrize("router", ["r2r", pytest.param("citer", marks=pytest.mark.slow)])
def test_the_command_writes_what_the_server_loads(
    router: str, prompts: Path, tmp_path: Path
) -> None:
    result = command(router, prompts, tmp_path / "one")
    assert result.exit_code == 0, result.output
    told = json.loads((tmp_path / "one" / "report.json").read_text())
    assert f"--router {router} --router-config checkpoint={tmp_path / 'one'}\n" in result.output
    values = check_serves(router, (("checkpoint", str(tmp_path / "one")),))
    assert values[told["parameter"]] == told["threshold"]
    shares = [point["llm_share"] for point in told["curve"]]
    assert shares == sorted(shares) and 0.3 < shares[-1] < 1


@pytest.mark.slow
def test_the_same_command_writes_the_same_bytes(prompts: Path, tmp_path: Path) -> None:
    """Both models run again: what they compute for a prompt does not depend on its neighbours."""
    for name in ("one", "two"):
        assert command("confidence", prompts, tmp_path / name).exit_code == 0
    for file in ("confidence.safetensors", "report.json"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_what_is_wrong_is_said_with_its_flag(prompts: Path, tmp_path: Path) -> None:
    for flags, message in (
        ({"models": "tiny"}, "--models tiny"),
        ({"hidden-dims": "12,x"}, "--hidden-dims 12,x"),
    ):
        result = command("r2r", prompts, tmp_path / "out", **flags)
        assert result.exit_code == 2
        assert message in result.output
    assert not (tmp_path / "out").exists()


@pytest.fixture
def collects_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def collect(*args: Any) -> None:
        raise AssertionError("the models ran")

    monkeypatch.setattr(Source, "collect", collect)


@pytest.mark.usefixtures("collects_nothing")
def test_a_place_where_nothing_can_be_written_is_refused_before_the_models_run(
    prompts: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    # A folder that is there and takes no files, and one that cannot be made.
    for out in (Path("/proc/self"), tmp_path / "file" / "out"):
        result = command("citer", prompts, out)
        assert result.exit_code == 2, result.output
        assert f"--out {out}: cannot be written: " in result.output
    with pytest.raises(AssertionError, match="the models ran"):
        raise command("citer", prompts, tmp_path / "new").exception
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.usefixtures("collects_nothing")
def test_a_model_without_a_readable_embedding_is_refused_before_the_models_run(
    prompts: Path, tmp_path: Path
) -> None:
    model = write_gguf(make_model("qwen3", vocab_size=1000), tmp_path / "small.gguf")
    shutil.copy(demo.model_path("tiny") / "tokenizer.json", tmp_path)
    result = command("r2r", prompts, tmp_path / "out", models=f"{model},small")
    assert result.exit_code == 2, result.output
    assert f"--models {model}: no safetensors file there holds" in result.output
    assert "--router-config" not in result.output
    assert not (tmp_path / "out").exists()


def test_a_prompt_that_the_models_refuse_is_an_error_of_the_file() -> None:
    class Refusing:
        def generate(self, *args: Any, **options: Any) -> Any:
            raise RequestError("the prompt has 2000 tokens, the models take 1024")

    refusing: Any = Refusing()
    with pytest.raises(ConfigError, match="--prompts: the prompt has 2000 tokens"):
        Source(("tiny", "small"), max_tokens=8).answer(refusing, ["long"], print)


@pytest.mark.parametrize("router", ROUTERS)
def test_a_trained_router_ships_with_the_pair(router: str) -> None:
    folder = demo.ROUTERS_DIR / router
    told = json.loads((folder / "report.json").read_text())
    assert sum(file.stat().st_size for file in folder.iterdir()) < BYTES
    values = check_serves(router, ())
    assert values["checkpoint"] == str(folder)
    assert values[told["parameter"]] == told["threshold"]
    # By chance it would be the share of such tokens, 0.02.
    assert told["average_precision"] > 0.2


def test_a_checkpoint_of_ones_own_comes_before_the_pairs(tmp_path: Path) -> None:
    own = (("checkpoint", str(tmp_path)),)
    plan = make_plan(config_from_flags({"router": "citer", "router_config": own}))
    assert plan.router_config["checkpoint"] == str(tmp_path)
    given = make_plan(config_from_flags({"router": "citer", "router_config": (("tau", "0.5"),)}))
    assert given.router_config["tau"] == 0.5
    assert given.router_config["checkpoint"] == str(demo.router_checkpoint("citer"))
