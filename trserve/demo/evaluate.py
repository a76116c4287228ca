"""Measures the embedded pair: ``python -m trserve.demo.evaluate``.

Accuracy on held-out problems of each model alone and of both routed by R-Stitch, with the share
of tokens that the LLM writes. Float32, greedy, plain torch: independent of the server.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from trserve.demo import PAIR_DIR
from trserve.demo.decoding import LLM_ALONE, SLM_ALONE, Pair
from trserve.demo.grammar import Problem, extract_answer, held_out
from trserve.demo.tokenizer_build import render_prompt

PROBLEMS: Final = 300
REPORT_SEED: Final = 4242
TUNE_SEED: Final = 2718
"""Thresholds are chosen on problems of this seed, and reported on those of the other."""
TAUS: Final = (0.2, 0.15, 0.1, 0.08, 0.06, 0.05, 0.04, 0.03, 0.02, 0.01)
RECOVERED_TARGET: Final = 0.95
MAX_LLM_SHARE: Final = 0.10


class Outcome(NamedTuple):
    """Accuracy over problems; ``exact`` is the share identical to the reference answer."""

    tau: float
    accuracy: float
    exact: float
    llm_share: float


def measure(pair: Pair, problems: Sequence[Problem], tau: float) -> Outcome:
    """Decodes every problem and compares the final numbers."""
    answers = pair.decode([render_prompt(p) for p in problems], tau)
    pairs = list(zip(answers, problems, strict=True))
    return Outcome(
        tau,
        sum(extract_answer(a.text) == p.value for a, p in pairs) / len(pairs),
        sum(a.text == p.answer for a, p in pairs) / len(pairs),
        sum(a.llm_tokens for a in answers) / sum(a.tokens for a in answers),
    )


def recovered(routed: Outcome, slm: Outcome, llm: Outcome) -> float:
    """Share of the gap in accuracy between SLM and LLM that routing closes."""
    return (routed.accuracy - slm.accuracy) / (llm.accuracy - slm.accuracy)


def choose_tau(pair: Pair, count: int = PROBLEMS) -> float:
    """The largest of ``TAUS`` that recovers 95 % of the gap on the tuning seed.

    Where none does so with at most 10 % of the tokens from the LLM, the most accurate that
    stays below that share.
    """
    problems = held_out(count, TUNE_SEED)
    slm, llm = (measure(pair, problems, tau) for tau in (SLM_ALONE, LLM_ALONE))
    affordable = []
    for tau in TAUS:
        outcome = measure(pair, problems, tau)
        if outcome.llm_share > MAX_LLM_SHARE:
            break
        affordable.append(outcome)
        if recovered(outcome, slm, llm) >= RECOVERED_TARGET:
            break
    return max(affordable, key=lambda o: (o.accuracy, o.tau)).tau


def main(argv: list[str] | None = None) -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(
        prog="python -m trserve.demo.evaluate", description="Measures the embedded pair."
    )
    parser.add_argument("--pair", type=Path, default=PAIR_DIR, help="directory of the two models")
    parser.add_argument("--problems", type=int, default=PROBLEMS)
    parser.add_argument("--seed", type=int, default=REPORT_SEED)
    parser.add_argument("--tau", type=float, nargs="*", default=TAUS)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    pair = Pair.load(args.pair)
    problems = held_out(args.problems, args.seed)
    slm, llm = (measure(pair, problems, tau) for tau in (SLM_ALONE, LLM_ALONE))
    table = Table("router", "LLM tokens", "accuracy", "exact text", "gap recovered")
    _add(table, "SLM alone", slm, slm, llm)
    for tau in args.tau:
        _add(table, f"R-Stitch, tau {tau:g}", measure(pair, problems, tau), slm, llm)
    _add(table, "LLM alone", llm, slm, llm)
    Console().print(table)


def _add(table: Table, label: str, outcome: Outcome, slm: Outcome, llm: Outcome) -> None:
    share = 1.0 if outcome.tau == LLM_ALONE else outcome.llm_share
    gap = recovered(outcome, slm, llm)
    table.add_row(label, *(f"{x:.1%}" for x in (share, outcome.accuracy, outcome.exact, gap)))


if __name__ == "__main__":
    main()
