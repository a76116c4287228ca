"""How much memory flashinfer's planner asks for: partial results of keys that are shared out.

Its planner (``include/flashinfer/attention/scheduler.cuh``: ``PrefillSplitQOKVIndptr`` and
``PrefillPlanImpl``; tiles by ``FA2DetermineCtaTileQ`` in ``utils.cuh``; read in 0.5.3 and 0.6.18)
keeps, for every query head and each of the step's programs, a tile of float32 rows and a sum a
row. For a graph it always shares out, and reserves what the worst step of the graph's shape takes;
a buffer that is too small is an error at the plan. Later versions can run fewer programs, not more.

Pure arithmetic over shapes: knows no torch, no device and no wrapper.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

_LEAST: Final = 128 << 20
"""What flashinfer's documentation recommends."""
_ALIGNMENT: Final = 1 << 20
_FLOAT: Final = 4
_PROGRAMS_A_PROCESSOR: Final = 2

MOST_PROCESSORS: Final = 192
"""Multiprocessors that a GPU has at most (the largest chip of compute capability 12.0), for plans
that are made before anybody has asked a device."""


class Heads(NamedTuple):
    """Query heads, KV heads, and a head's size, of one process."""

    query: int
    kv: int
    size: int


def workspace_bytes(heads: Heads, processors: int, shapes: Iterable[tuple[int, int]]) -> int:
    """Bytes that serve all graphs of ``shapes`` (rows, and tokens of each) and every other step.

    Args:
        processors: multiprocessors of the device.
    """
    most = max((graph_bytes(heads, processors, *shape) for shape in shapes), default=0)
    most = max(most, eager_bytes(heads, processors), _LEAST)
    return -(-most // _ALIGNMENT) * _ALIGNMENT


def graph_bytes(heads: Heads, processors: int, rows: int, width: int) -> int:
    """Of a graph of ``rows`` rows of ``width`` tokens."""
    group, tokens = heads.query // heads.kv, rows * width
    # One row may have all the tokens that are not the others' last, says the planner.
    tile = _tile((tokens - rows + 1) * group, heads.size)
    tiles = -(-tokens * group // tile) + rows - 1
    return _bytes(heads, max(_shares(heads, processors), tiles), tile)


def eager_bytes(heads: Heads, processors: int) -> int:
    """Of any step without a graph: it shares out only what then fills the device once.

    Decodes that use no tensor cores keep a row, not a tile, for each of at most 32 programs a
    multiprocessor; that is never more.
    """
    return _bytes(heads, _shares(heads, processors), _largest_tile(heads.size))


def _shares(heads: Heads, processors: int) -> int:
    return _PROGRAMS_A_PROCESSOR * processors // heads.kv


def _bytes(heads: Heads, programs: int, tile: int) -> int:
    return heads.query * programs * tile * (heads.size + 1) * _FLOAT


def _tile(queries: int, size: int) -> int:
    """Rows of a tile for ``queries`` rows (tokens times group) of heads of ``size``."""
    if size >= 512:
        return 16 if queries <= 32 else 32
    if queries > 64 and size < 256:
        return 128
    return 64 if queries > 16 else 16


def _largest_tile(size: int) -> int:
    return _tile(1 << 30, size)
