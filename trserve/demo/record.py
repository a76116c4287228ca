"""Writes ``pair.json``: what the weights are, how they were made and what they measured.

Knows the file; the figures come from ``evaluate``.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, get_args

from trserve.demo import PairModel
from trserve.demo.decoding import LLM_ALONE, SLM_ALONE, Pair
from trserve.demo.evaluate import (
    PROBLEMS,
    REPORT_SEED,
    TUNE_SEED,
    choose_tau,
    measure,
    recovered,
)
from trserve.demo.grammar import held_out
from trserve.demo.modeling import RECIPES


def weights_sha256(directory: Path) -> str:
    """Hexadecimal SHA-256 of a checkpoint's weights file."""
    return hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest()


def record_pair(directory: Path, seed: int, count: int = PROBLEMS) -> dict[str, Any]:
    """Chooses tau, measures the pair under ``directory`` and writes its ``pair.json``."""
    pair = Pair.load(directory)
    tau = choose_tau(pair, count)
    problems = held_out(count, REPORT_SEED)
    slm, llm, routed = (measure(pair, problems, t) for t in (SLM_ALONE, LLM_ALONE, tau))
    record = {
        "seed": seed,
        "models": {name: _model(directory, name, pair) for name in get_args(PairModel)},
        "router": "r-stitch",
        "tau": tau,
        "tau_chosen_on": {"seed": TUNE_SEED, "problems": count},
        "measured_on": {"seed": REPORT_SEED, "problems": count, "dtype": "float32"},
        "accuracy": {
            name: round(outcome.accuracy, 4)
            for name, outcome in (("slm", slm), ("llm", llm), ("routed", routed))
        },
        "llm_token_share": round(routed.llm_share, 4),
        "gap_recovered": round(recovered(routed, slm, llm), 4),
    }
    text = json.dumps(record, indent=2) + "\n"
    (directory / "pair.json").write_text(text, encoding="utf-8")
    return record


def _model(directory: Path, name: PairModel, pair: Pair) -> dict[str, Any]:
    model = pair.slm if name == "tiny" else pair.llm
    return {
        "sha256": weights_sha256(directory / name),
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": RECIPES[name].steps,
    }
