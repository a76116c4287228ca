"""What launch scripts of other servers write, put in the form of trserve's own flags.

Models before the flags, several values after one flag, switches for what trserve always does, and
flags that have no counterpart. Knows command lines as lists of words; no setting and no click.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from typing import Final

SEVERAL: Final = frozenset({"--api-key", "--served-model-name"})
"""Flags of which vLLM takes several values, one word each."""

ALWAYS: Final = frozenset(
    {
        "--enable-metrics",
        "--enable-chunked-prefill",
        "--enable-auto-tool-choice",
        "--enable-prompt-tokens-details",
        "--enable-cache-report",
        "--trust-remote-code",
    }
)
"""Switches for what is so anyway. (No code of a checkpoint is ever run.)"""

_CAPTURED: Final = "graphs are captured for all batches up to --max-num-seqs"
INSTEAD: Final[dict[str, str]] = {
    "--cuda-graph-max-bs": _CAPTURED,
    "--cuda-graph-bs": _CAPTURED,
    "--cudagraph-capture-sizes": _CAPTURED,
    "--skip-tokenizer-init": "the gateway needs the tokenizer; clients may send and ask for ids",
    "--tokenizer-mode": "tokenizer.json is read as it is",
    "--kv-cache-dtype": "the KV cache has the precision of --dtype",
    "--uvicorn-log-level": "--log-level is for every part",
    "--log-level-http": "--log-level is for every part",
    "--disable-log-stats": "nothing is logged but requests: --no-log-requests; /metrics stays",
    "--ssl-keyfile": "put a proxy that ends TLS in front",
    "--ssl-certfile": "put a proxy that ends TLS in front",
    "--root-path": "have the proxy in front strip the path",
}
"""Flags without a counterpart, and what to do."""


class ForeignFlagError(ValueError):
    """Something that trserve cannot be told so."""


def translate(words: Sequence[str], model_names: Collection[str] = ()) -> list[str]:
    """The command line ``words`` in trserve's form.

    Args:
        model_names: what is certainly a model, and no key.

    Raises:
        ForeignFlagError: it has a flag without a counterpart, or a word that may be a model or a
            key.
    """
    models, rest = _leading(words)
    if models and any(word.partition("=")[0] in _MODELS for word in rest):
        raise ForeignFlagError("models are named twice: before the flags, and by --models")
    found = ["--models", ",".join(models)] if models else []
    while rest:
        word, *rest = rest
        flag = word.partition("=")[0]
        if flag in INSTEAD:
            raise ForeignFlagError(f"{flag}: there is none; {INSTEAD[flag]}")
        if word in ALWAYS:
            continue
        found.append(word)
        if word in SEVERAL:
            values, rest = _leading(rest)
            _check(word, values[1:], model_names)
            found += [",".join(values)] if values else []
    return found


_MODELS: Final = frozenset({"--models", "--model", "--model-path"})


def _leading(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words before the first flag, and the others."""
    count = next((n for n, word in enumerate(words) if word.startswith("-")), len(words))
    return list(words[:count]), list(words[count:])


def _check(flag: str, further: Sequence[str], model_names: Collection[str]) -> None:
    """A model's name that became a key by mistake would let anyone in who guesses it."""
    for word in further:
        parts = [part.lower() for part in word.split(",")]
        if any(part in model_names for part in parts) or "/" in word or os.path.exists(word):
            raise ForeignFlagError(
                f"a model after {flag}: models stand before the flags, or after --models"
            )
