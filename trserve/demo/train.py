"""Trains the embedded pair from nothing: ``python -m trserve.demo.train``.

Writes two checkpoint directories and, once both are there, measures the pair and writes
``pair.json``. The same seed on the same machine gives the same weights.
"""

from __future__ import annotations

import argparse
import os
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer

from trserve.demo import PAIR_DIR, PairModel
from trserve.demo.data import IGNORED, Batch, TrainingStream, problem_batches
from trserve.demo.grammar import held_out
from trserve.demo.modeling import (
    RECIPES,
    Phase,
    build_model,
    load_checkpoint,
    prepare_for_training,
    write_checkpoint,
)
from trserve.demo.optim import MuonAdamW
from trserve.demo.record import record_pair
from trserve.demo.tokenizer_build import build_tokenizer, load_tokenizer, write_tokenizer
from trserve.ipc.process import die_with_parent

DRILL_UNTIL: Final = 0.7
CURVE_POINTS: Final = 8
CURVE_PROBLEMS: Final = 300
CURVE_SEED: Final = 77
PHASE_SEED_STRIDE: Final = 1000
"""No phase repeats the data of another."""

PAIR_NAMES: Final[tuple[PairModel, ...]] = ("tiny", "small")

console = Console()


class Score(NamedTuple):
    """Teacher-forced: nats a token, share of right tokens, share of fully right answers."""

    nll: float
    tokens: float
    exact: float


def labelled_logits(model: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (n, vocab) and targets (n,) at the n labelled positions only.

    The all-ones mask says that there is no padding to mask; without it, skipped positions would
    be read as several sequences packed into one row.
    """
    hidden = model.model(
        input_ids=batch.ids,
        position_ids=batch.positions,
        attention_mask=torch.ones_like(batch.ids),
        use_cache=False,
    ).last_hidden_state[:, :-1]
    targets = batch.labels[:, 1:]
    kept = targets != IGNORED
    return model.lm_head(hidden[kept]), targets[kept]


@torch.no_grad()
def score(model: Any, tokenizer: Tokenizer) -> Score:
    """Teacher-forced score on held-out problems."""
    nll, right, count, exact = 0.0, 0, 0, 0
    model.eval()
    problems = held_out(CURVE_PROBLEMS, CURVE_SEED)
    for batch in problem_batches(problems, tokenizer):
        logits, targets = labelled_logits(model, batch)
        nll += F.cross_entropy(logits.float(), targets, reduction="sum").item()
        hit = logits.argmax(-1) == targets
        right, count = right + int(hit.sum()), count + len(hit)
        rows = (batch.labels[:, 1:] != IGNORED).sum(-1).tolist()
        exact += sum(bool(row.all()) for row in torch.split(hit, rows))
    model.train()
    return Score(nll / count, right / count, exact / len(problems))


def train_phase(
    model: Any, phase: Phase, stream: TrainingStream, label: str, *, bfloat16: bool, bar: bool
) -> None:
    """One learning-rate cycle over ``stream``, in place, printing the learning curve."""
    optimiser = MuonAdamW(model, phase.steps, phase.decay)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=bfloat16)
    every = phase.steps // CURVE_POINTS
    started = time.monotonic()
    with _progress(bar) as progress:
        task = progress.add_task(label, total=phase.steps)
        for step, batch in zip(range(phase.steps), stream, strict=False):
            if step >= DRILL_UNTIL * phase.steps:
                stream.drill = phase.drill_end
            with autocast:
                logits, targets = labelled_logits(model, batch)
            torch.autograd.backward(F.cross_entropy(logits.float(), targets))
            optimiser.step(step)
            progress.advance(task)
            if (step + 1) % every == 0:
                seconds = time.monotonic() - started
                _report(label, step + 1, seconds, score(model, stream.tokenizer))


def _report(label: str, step: int, seconds: float, result: Score) -> None:
    console.print(
        f"{label}: step {step:5d}  {seconds:6.0f} s  nll {result.nll:.4f}  "
        f"tokens {result.tokens:.4f}  exact {result.exact:.3f}",
        highlight=False,
    )


def _progress(shown: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not shown,
    )


def _train_into(name: PairModel, out: Path, seed: int, bar: bool = True, first: int = 0) -> None:
    """Runs the phases of ``name`` from ``first`` on, with a checkpoint after each."""
    # Both models are trained at once, one core each.
    torch.set_num_threads(1)
    recipe, directory = RECIPES[name], out / name
    tokenizer = load_tokenizer(directory)
    for index, phase in enumerate(recipe.phases[first:], first):
        if index == 0:
            model = build_model(recipe, tokenizer.get_vocab_size(), seed)
        else:
            model = prepare_for_training(load_checkpoint(directory))
        data_seed = seed + PHASE_SEED_STRIDE * index
        stream = TrainingStream(tokenizer, data_seed, phase.drill, phase.first)
        label = f"{name}, phase {index + 1}"
        train_phase(model, phase, stream, label, bfloat16=recipe.bfloat16, bar=bar)
        write_checkpoint(model, directory)


def _train_both(out: Path, seed: int) -> None:
    """One process and one core a model; the LLM takes longer, so the bar shows that one."""
    # The other process ends with this one, however this one ends.
    with ProcessPoolExecutor(
        1, get_context("spawn"), initializer=die_with_parent, initargs=(os.getpid(),)
    ) as pool:
        slm = pool.submit(_train_into, "tiny", out, seed, bar=False)
        _train_into("small", out, seed)
        slm.result()


def _write_tokenizers(out: Path, seed: int) -> None:
    tokenizer = build_tokenizer(seed)
    for name in PAIR_NAMES:
        write_tokenizer(tokenizer, out / name)
    console.print(f"tokenizer: {tokenizer.get_vocab_size()} tokens")


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m trserve.demo.train", description="Trains the embedded pair."
    )
    parser.add_argument("--which", choices=("slm", "llm", "both", "tokenizer"), default="both")
    parser.add_argument("--out", type=Path, default=PAIR_DIR, metavar="DIR")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--from-phase",
        type=int,
        default=1,
        metavar="N",
        help="with slm or llm: go on from the checkpoint that phase N - 1 left in DIR",
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Command line entry."""
    args = _arguments(argv)
    match args.which:
        case "slm":
            _train_into("tiny", args.out, args.seed, first=args.from_phase - 1)
        case "llm":
            _train_into("small", args.out, args.seed, first=args.from_phase - 1)
        case "tokenizer":
            _write_tokenizers(args.out, args.seed)
            return
        case _:
            _write_tokenizers(args.out, args.seed)
            _train_both(args.out, args.seed)
    if all((args.out / name / "model.safetensors").is_file() for name in PAIR_NAMES):
        console.print_json(data=record_pair(args.out, args.seed))


if __name__ == "__main__":
    main()
