"""Trains the embedded pair from nothing: ``python -m trserve.demo.train``.

Writes two checkpoint directories and, once both are there, measures the pair and writes
``pair.json``. The same seed on the same machine gives the same weights.
"""

from __future__ import annotations

import argparse
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
from trserve.demo.modeling import RECIPES, build_model, write_checkpoint
from trserve.demo.optim import MuonAdamW
from trserve.demo.record import record_pair
from trserve.demo.tokenizer_build import build_tokenizer, load_tokenizer, write_tokenizer

DRILL_UNTIL: Final = 0.7
CURVE_POINTS: Final = 8
CURVE_PROBLEMS: Final = 300
CURVE_SEED: Final = 77

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


def train_model(name: PairModel, tokenizer: Tokenizer, seed: int, bar: bool = True) -> Any:
    """Trains one model, printing its learning curve; returns it in float32."""
    recipe = RECIPES[name]
    model = build_model(recipe, tokenizer.get_vocab_size(), seed)
    optimiser = MuonAdamW(model, recipe.steps)
    stream = TrainingStream(tokenizer, seed, recipe.drill)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=recipe.bfloat16)
    every = recipe.steps // CURVE_POINTS
    started = time.monotonic()
    with _progress(bar) as progress:
        task = progress.add_task(name, total=recipe.steps)
        for step, batch in zip(range(recipe.steps), stream, strict=False):
            if step >= DRILL_UNTIL * recipe.steps:
                stream.drill = recipe.drill_end
            with autocast:
                logits, targets = labelled_logits(model, batch)
            torch.autograd.backward(F.cross_entropy(logits.float(), targets))
            optimiser.step(step)
            progress.advance(task)
            if (step + 1) % every == 0:
                _report(name, step + 1, time.monotonic() - started, score(model, tokenizer))
    return model.eval()


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


def _train_into(name: PairModel, out: Path, seed: int, bar: bool = True) -> None:
    # At these sizes a second thread costs more in barriers than it saves in arithmetic.
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(out / name)
    write_checkpoint(train_model(name, tokenizer, seed, bar), out / name)


def _train_both(out: Path, seed: int) -> None:
    """One process and one core a model; the LLM takes longer, so the bar shows that one."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
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
    parser.add_argument("--out", type=Path, default=PAIR_DIR, help="where the two models go")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Command line entry."""
    args = _arguments(argv)
    match args.which:
        case "slm":
            _train_into("tiny", args.out, args.seed)
        case "llm":
            _train_into("small", args.out, args.seed)
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
