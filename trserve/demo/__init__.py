"""The embedded pair: two tiny models with one tokenizer, and the routers trained for them.

Importing this costs nothing: no torch, no weights. Knows only where the files lie.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final, Literal

PAIR_DIR: Final = Path(__file__).parent / "pair"
ROUTERS_DIR: Final = Path(__file__).parent / "routers"
PairModel = Literal["tiny", "small"]


def model_path(name: PairModel) -> Path:
    """The checkpoint directory of the SLM (``tiny``) or the LLM (``small``).

    Raises:
        ValueError: ``name`` is neither.
    """
    if name not in ("tiny", "small"):
        raise ValueError(f"the embedded pair has the models 'tiny' and 'small', not {name!r}")
    return PAIR_DIR / name


def default_tau() -> float:
    """The R-Stitch threshold stored with the weights, in normalised entropy (0 to 1)."""
    record = json.loads((PAIR_DIR / "pair.json").read_text(encoding="utf-8"))
    return float(record["tau"])


def router_pairs(router: str) -> tuple[tuple[str, str], ...]:
    """``--router-config`` of the pair's trained ``router``; empty where there is none of that name.

    Its checkpoint, and its threshold unless the checkpoint states that itself.
    """
    report = ROUTERS_DIR / router / "report.json"
    if not report.is_file():
        return ()
    told = json.loads(report.read_text(encoding="utf-8"))
    checkpoint = ("checkpoint", str(report.with_name(told["checkpoint"])))
    if router == "r2r":
        return (checkpoint,)
    return (checkpoint, (told["parameter"], repr(told["threshold"])))
