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


def router_checkpoint(router: str) -> Path | None:
    """The folder of the pair's trained ``router``, which states its threshold; None: there is none.

    See ``trserve.training.demo`` for how they were made.
    """
    folder = ROUTERS_DIR / router
    return folder if folder.is_dir() else None
