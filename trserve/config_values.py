"""From the text of a flag to its value. Knows no flag; raises ValueError with the reason."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from typing import Final

COMPATIBLE: Final = ("vllm", "sglang")
LOG_LEVELS: Final = ("debug", "info", "warning", "error", "critical")
MAX_BUCKETS: Final = 100
_SWITCH: Final = {
    **dict.fromkeys(("true", "on", "yes", "1"), True),
    **dict.fromkeys(("false", "off", "no", "0"), False),
}


def parse_names(text: str) -> tuple[str, ...]:
    """``A,B`` to a tuple of names."""
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise ValueError(f"{text!r} has an empty name")
    return names


def parse_counts(text: str) -> tuple[int, ...]:
    """``1,1`` to a tuple of positive integers."""
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{text!r} is no list of whole numbers") from None
    if min(counts) < 1:
        raise ValueError(f"{text!r} must be 1 or more everywhere")
    return counts


def parse_groups(text: str) -> tuple[tuple[int, ...], ...]:
    """``0/0,1`` to one group of device numbers a model."""
    try:
        groups = tuple(tuple(int(part) for part in each.split(",")) for each in text.split("/"))
    except ValueError:
        raise ValueError(f"{text!r} is no list of GPU numbers; write 0/0,1") from None
    for group in groups:
        if min(group) < 0 or len(set(group)) < len(group):
            raise ValueError(f"{text!r} names a GPU twice for one model, or a negative one")
    return groups


def parse_thresholds(text: str) -> tuple[int, ...]:
    """``1,3`` as ``parse_counts``; ``auto`` is nothing."""
    return () if text.strip().lower() == "auto" else parse_counts(text)


def parse_bytes(text: str) -> int:
    """``2g``, ``512m`` or plain bytes to bytes."""
    units = {"k": 2**10, "m": 2**20, "g": 2**30}
    digits = text.lower().removesuffix("b").removesuffix("i")
    unit = units.get(digits[-1:], 1)
    try:
        value = int(float(digits[:-1] if unit > 1 else digits) * unit)
    except (ValueError, OverflowError):
        raise ValueError(f"{text!r} is no size; write 2g, 512m or a number of bytes") from None
    if value <= 0:
        raise ValueError(f"{text!r} must be more than nothing")
    return value


def parse_length(text: str) -> int:
    """``4096``, ``8k`` (8000) or ``8K`` (8192), as vLLM reads them; ``auto`` is 0."""
    if text.strip().lower() == "auto":
        return 0
    unit = {"k": 1000, "K": 1024, "m": 10**6, "M": 2**20}.get(text[-1:], 1)
    try:
        value = int(float(text[:-1]) * unit) if unit > 1 else int(text)
    except (ValueError, OverflowError):
        raise ValueError(f"{text!r} is no number of tokens; write 8192, 8k or auto") from None
    return value


def parse_level(text: str) -> str:
    """``INFO`` to ``info``."""
    if text.lower() not in LOG_LEVELS:
        raise ValueError(f"{text!r} is none of: {', '.join(LOG_LEVELS)}")
    return text.lower()


def parse_switch(text: str) -> bool:
    """``true``, ``on``, ``yes``, ``1`` or their opposites."""
    word = text.strip().lower()
    if word not in _SWITCH:
        raise ValueError(f"{text!r} is neither true nor false")
    return _SWITCH[word]


def parse_assignments(text: str) -> tuple[tuple[str, str], ...]:
    """``k=v,...`` to pairs of texts."""
    pairs: list[tuple[str, str]] = []
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if not equals or not key.strip() or not value.strip():
            raise ValueError(f"{part!r} is not of the form key=value")
        pairs.append((key.strip(), value.strip()))
    return tuple(pairs)


def parse_keys(text: str) -> tuple[str, ...]:
    """``A,B`` or ``@FILE`` to keys as they were given. No message shows any."""
    if text.startswith("@"):
        return (text,)
    keys = tuple(key.strip() for key in text.split(","))
    if not all(keys):
        raise ValueError("an empty key would let anyone in; `trserve keys new` makes one")
    return keys


def parse_origins(text: str) -> tuple[str, ...]:
    """``A,B``, or a JSON list as vLLM takes it, to origins; nothing means none."""
    if text.lstrip().startswith("["):
        try:
            found = json.loads(text)
        except ValueError:
            raise ValueError(f"{text!r} is no JSON list") from None
        text = ",".join(map(str, found))
    origins = tuple(part.strip().rstrip("/").lower() for part in text.split(",") if part.strip())
    for origin in origins:
        if origin != "*" and not origin.startswith(("http://", "https://")):
            raise ValueError(f"{origin!r} is no origin; write https://host or *")
    return origins


def parse_compat(text: str) -> tuple[str, ...]:
    """``vllm,sglang`` to a tuple of them."""
    names = tuple(name.lower() for name in parse_names(text))
    for name in names:
        if name not in COMPATIBLE:
            raise ValueError(f"{name!r} is none of: {', '.join(COMPATIBLE)}")
    return names


def parse_buckets(text: str) -> tuple[float, ...]:
    """``0.001,0.01,1`` to rising upper bounds in seconds."""
    try:
        bounds = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{text!r} is no list of seconds") from None
    if not all(0 < bound < math.inf for bound in bounds):
        raise ValueError(f"{text!r} must be finite and more than 0 everywhere")
    if len(bounds) > MAX_BUCKETS or any(low >= high for low, high in pairwise(bounds)):
        raise ValueError(f"{text!r} must rise, and have at most {MAX_BUCKETS} bounds")
    return bounds
