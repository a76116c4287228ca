"""Which steps a graph can compute: numbers of rows, and tokens of each.

A graph has a fixed shape; a step with fewer rows is padded to the next bucket. Rows must be equally
wide: a row with fewer tokens is led by tokens that are in the cache already, which are computed
again and stored nowhere, so its own come out as they would alone. Knows shapes; no model, no graph.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from trserve.errors import ConfigError
from trserve.workers.step import StepInputs

PIECES_VARIABLE: Final = "TRSERVE_CUDA_GRAPHS"
PIECES: Final = ("slm", "extend", "router")
"""What can be captured, by the names of the ablation: steps of one token a row, steps of several,
and what follows the logits: sampling, the router's score and its decision. What is left out is
launched operation by operation over the same shapes, padding included, and computes the same."""

EXTEND_WIDTHS: Final = (2, 4, 8)
"""Tokens a row of extends that have a graph: suffixes that came by handoff."""

_STEP: Final = 8


@dataclass(frozen=True)
class RunnerLimits:
    """The largest step, and what is captured (:data:`PIECES`)."""

    max_rows: int
    max_tokens: int
    pieces: frozenset[str]


class Bucket(NamedTuple):
    """A graph's shape: ``rows`` rows of ``width`` tokens."""

    rows: int
    width: int

    @property
    def tokens(self) -> int:
        """Tokens of the step, padding included."""
        return self.rows * self.width

    @property
    def piece(self) -> str:
        """Which of ``PIECES`` it belongs to."""
        return "slm" if self.width == 1 else "extend"


def pieces_from_environment() -> frozenset[str]:
    """What ``TRSERVE_CUDA_GRAPHS`` names, separated by commas; all where it is not set.

    Raises:
        ConfigError: it names something else.
    """
    given = os.environ.get(PIECES_VARIABLE)
    if given is None:
        return frozenset(PIECES)
    found = frozenset(part.strip() for part in given.split(",") if part.strip())
    if wrong := sorted(found.difference(PIECES)):
        raise ConfigError(
            f"{PIECES_VARIABLE}={given}: {wrong[0]} is no piece; name some of {', '.join(PIECES)}, "
            "or nothing to capture none"
        )
    return found


def row_buckets(max_rows: int) -> list[int]:
    """1, 2, 4, 8, then every 8, up to ``max_rows``, which is one itself."""
    small = [rows for rows in (1, 2, 4) if rows < max_rows]
    return [*small, *range(_STEP, max_rows, _STEP), max_rows]


def extend_rows(max_rows: int) -> list[int]:
    """Powers of two up to ``max_rows``, which is one itself: extends of many rows are rare."""
    return [*(1 << bit for bit in range((max_rows - 1).bit_length())), max_rows]


@dataclass(frozen=True)
class Buckets:
    """The shapes of graphs, by width: numbers of rows in rising order."""

    by_width: dict[int, list[int]]

    @classmethod
    def of(cls, *, max_rows: int, max_tokens: int) -> Buckets:
        """Those that steps of up to so many rows and tokens may need."""
        found = {1: row_buckets(max_rows)}
        rows = extend_rows(max_rows)
        found |= {w: [r for r in rows if r * w <= max_tokens] for w in EXTEND_WIDTHS}
        return cls({width: each for width, each in found.items() if each})

    @property
    def largest_first(self) -> list[Bucket]:
        """All, in the order of capture: the smaller ones then fit into the memory of the larger."""
        found = [Bucket(rows, width) for width, each in self.by_width.items() for rows in each]
        return sorted(found, key=lambda bucket: (bucket.tokens, bucket.width), reverse=True)

    def find(self, step: StepInputs) -> Bucket | None:
        """The smallest shape that can compute ``step``; None where none can."""
        rows = step.num_rows
        if step.decode_only:
            return self._fitting(rows, 1)
        widest = int(np.diff(step.query_start[: rows + 1]).max())
        if widest > EXTEND_WIDTHS[-1]:
            return None
        width = EXTEND_WIDTHS[bisect_left(EXTEND_WIDTHS, widest)]
        # A row needs a token in the cache for each that leads its own.
        if int(step.kv_len[:rows].min()) < width:
            return None
        return self._fitting(rows, width)

    def _fitting(self, rows: int, width: int) -> Bucket | None:
        sizes = self.by_width.get(width)
        if sizes is None or rows > sizes[-1]:
            return None
        return Bucket(sizes[bisect_left(sizes, rows)], width)
