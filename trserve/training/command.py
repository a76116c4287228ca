"""``trserve train-router``: from prompts to a checkpoint that the server loads, and its report.

Puts the parts together; progress goes to standard error, the result to standard output.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from trserve.errors import ConfigError
from trserve.models.spec import read_spec
from trserve.router_lib.learned import read_token_embedding
from trserve.training.citer import train_citer
from trserve.training.co_llm import train_co_llm
from trserve.training.collect import Collected, Source
from trserve.training.fit import Recipe, Setting
from trserve.training.mlp import train_mlp
from trserve.training.prompts import TrainingPrompt, read_prompts
from trserve.training.r2r import Shape, train_r2r
from trserve.training.report import Trained, prepare, write
from trserve.training.rollouts import divergent

ROUTERS: Final = ("r2r", "citer", "co-llm", "confidence")


@dataclass(frozen=True)
class Job:
    """What to train; ``neutral``: of R2R, whether differences that change nothing count as such."""

    router: str
    setting: Setting
    shape: Shape = field(default_factory=Shape)
    neutral: bool = True


def say(line: str) -> None:
    """Progress, for a person."""
    print(line, file=sys.stderr, flush=True)


def train(
    job: Job, source: Source, prompts: Sequence[TrainingPrompt], collected: Collected
) -> Trained:
    """Train ``job.router`` on what was collected.

    Raises:
        ConfigError: the prompts do not do for it.
    """
    dataset, setting = collected.dataset, job.setting
    if not bool(dataset.differs.any()):
        raise ConfigError(
            "--prompts: both models write the same tokens for all of them; there is nothing to "
            "learn"
        )
    if job.router == "co-llm":
        return train_co_llm(dataset, setting)
    if job.router == "confidence":
        return train_mlp("confidence", dataset, 1.0 - dataset.differs, setting)
    if job.router == "citer":
        return train_citer(source, prompts, collected, setting)
    labels = divergent(source, collected, say) if job.neutral else dataset.differs
    return train_r2r(dataset, labels, token_embedding(source), job.shape, setting)


def token_embedding(source: Source) -> torch.Tensor:
    """The small model's, which R2R's network reads.

    Raises:
        ConfigError: no file of it holds one that can be read here.
    """
    path = Path(source.plan.models[0].path)
    return read_token_embedding(
        path,
        source.plan.tokenizer_size,
        read_spec(path).hidden_size,
        flag="--models ",
        instead="train another --router, or give its safetensors as the first of --models",
    )


def train_router(
    *,
    router: str,
    models: str,
    prompts: Path,
    out: Path,
    steps: int,
    seed: int,
    max_tokens: int,
    held_out: float,
    recall: float,
    hidden_dims: str,
    expansion: int,
    neutral: bool,
    dtype: str,
) -> None:
    """What the command does.

    Raises:
        StartupError: a flag, a model or the prompts do not do; the message says which.
    """
    shape = Shape(_widths(hidden_dims), expansion)
    setting = Setting(Recipe(steps=steps, seed=seed), held_out, recall, say)
    read = read_prompts(prompts)
    source = Source([name.strip() for name in models.split(",")], max_tokens, dtype)
    # Collecting takes hours; what would fail only after it is refused first.
    if router == "r2r":
        token_embedding(source)
    prepare(out)
    collected = source.collect(read, say)
    trained = train(Job(router, setting, shape, neutral), source, read, collected)
    show(write(trained, out), out)


def _widths(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise ConfigError(f"--hidden-dims {text}: expected widths, as 128,128")
    return tuple(map(int, parts))


def show(report: dict[str, Any], out: Path) -> None:
    """The threshold curve, and how to serve with what was written."""
    print(f"{'threshold':>12} {'LLM share':>10} {'precision':>10} {'recall':>8}")
    for point in (*report["curve"], report["at_threshold"]):
        shares = f"{point['llm_share']:10.2%} {point['precision']:10.1%} {point['recall']:8.1%}"
        print(f"{point['threshold']:12.6g} {shares}")
    print(
        f"the last one is the threshold to begin with; average precision "
        f"{report['average_precision']:.3f}"
    )
    print(f"trserve launch --router {report['router']} --router-config checkpoint={out}")
