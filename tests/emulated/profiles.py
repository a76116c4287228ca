"""Profiles that tests write: a valid pair, to be changed in one place."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PAIR: dict[str, Any] = {
    "format": 1,
    "name": "pair",
    "models": [
        {"name": "a", "step": {"ms": 2.0}, "prefill": {"tokens_per_s": 50000}},
        {
            "name": "b",
            "step": {"ms": {"1": 4.0, "8": 6.0}, "source": "chosen"},
            "prefill": {"tokens_per_s": 1e4, "free_tokens": 8},
            "agreement": {"probability": 0.5},
        },
    ],
    "routing": {"P": [[0.65, 0.35], [1, 0]], "C": [[1, 0], [1, 0]]},
    "max_model_len": 4096,
}

Path_ = Sequence[str | int]


def changed(path: Path_, value: Any) -> dict[str, Any]:
    """``PAIR`` with ``value`` at ``path``."""
    profile = copy.deepcopy(PAIR)
    place: Any = profile
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return profile


def text(profile: Any) -> bytes:
    return json.dumps(profile).encode()


def saved(folder: Path, profile: Any) -> str:
    file = folder / "profile.json"
    file.write_bytes(text(profile))
    return str(file)
