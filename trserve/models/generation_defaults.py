"""How a checkpoint wants to be sampled: its ``generation_config.json``.

Knows no requests. A value that is no number in its range is ignored: the file is a suggestion, and
a server must start without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from trserve.models.spec import read_json
from trserve.params import SamplingDefaults

_FILE: Final = "generation_config.json"
_RANGES: Final[Mapping[str, tuple[float, float]]] = {
    "temperature": (0.0, 1e6),
    "top_p": (1e-6, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
}


def read_sampling_defaults(checkpoint: Path) -> SamplingDefaults:
    """The defaults of a checkpoint directory; the plain ones where it suggests nothing.

    ``do_sample: false`` means greedy, as its author evaluated it; without the key the other
    values count, as in vLLM.
    """
    file = checkpoint / _FILE
    if not file.is_file():
        return SamplingDefaults()
    config = read_json(file)
    values: dict[str, Any] = {
        name: float(config[name])
        for name, (low, high) in _RANGES.items()
        if _is_number(config.get(name)) and low <= config[name] <= high
    }
    if type(config.get("top_k")) is int and config["top_k"] > 0:
        values["top_k"] = config["top_k"]
    if config.get("do_sample") is False:
        values["temperature"] = 0.0
    return SamplingDefaults(**values)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
