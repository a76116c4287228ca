"""A directory with an exported model: its files, and what they say of themselves.

Knows names and the manifest; nothing of graphs, sessions or torch. The launcher imports it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from trserve.errors import ModelUnavailableError

GRAPH: Final = "model.onnx"
HEAD: Final = "head.onnx"
"""The head alone, for prompts whose every token is scored."""
WEIGHTS: Final = "weights.data"
"""What both graphs point into."""
MANIFEST: Final = "trserve_onnx.json"
FORMAT: Final = 1
"""Grows whenever the inputs or outputs of the graphs change."""

PIP: Final = "pip install 'trserve[edge]'"


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What an export says of itself.

    Attributes:
        format: :data:`FORMAT` when it was written.
        source: the digest of the weights that it was made from; empty where they were drawn.
        int8: whether the projections' weights have 8 bits.
        positions: positions that the graph's rotary tables have: no row is longer.
        largest_difference: of logits, hidden states and taps from torch's, as it was measured.
    """

    format: int
    source: str = ""
    int8: bool = False
    positions: int
    largest_difference: float


def is_onnx_model(path: Path) -> bool:
    """Whether ``path`` is a directory that ``trserve export-onnx`` wrote to the end."""
    return (path / MANIFEST).is_file()


def read_manifest(path: Path) -> Manifest:
    """The manifest of the directory ``path``.

    Raises:
        ModelUnavailableError: it is damaged, of another version, or files are missing.
    """
    try:
        found = msgspec.json.decode((path / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.MsgspecError) as error:
        raise ModelUnavailableError(
            f"{path / MANIFEST} cannot be read: {error}; export the model again"
        ) from None
    if found.format != FORMAT:
        raise ModelUnavailableError(
            f"{path} was exported in format {found.format}, and this version reads {FORMAT}; "
            "export the model again: trserve export-onnx"
        )
    missing = [name for name in (GRAPH, HEAD, WEIGHTS) if not (path / name).is_file()]
    if missing:
        raise ModelUnavailableError(
            f"{path} lacks {', '.join(missing)}; copy it again, or export the model again"
        )
    return found
