"""Recorded traffic: when requests came, how long they were, and which prompts began alike.

``azure``: a CSV of TIMESTAMP, ContextTokens, GeneratedTokens (Azure LLM inference traces).
``mooncake``: JSON lines of timestamp (ms), input_length, output_length and hash_ids, one for each
512 tokens of the prompt: the same id is the same block. ``jsonl``: JSON lines of timestamp (ms) and
input_length, or a prompt or messages, with output_length. What was said is in none of the first
two: prompts are random ids, drawn from a block's id where there is one. Knows no server.
"""

from __future__ import annotations

import csv
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from bench.serve_asks import Ask, Prompt, ids_of, length_of, prompt_of, read_row

BLOCK: Final = 512
"""Tokens for which Mooncake has one hash."""
_CACHED_BLOCKS: Final = 4096
_DEFAULT_OUTPUT: Final = 128
_BLOCK_SEED, _OWN_SEED = 1, 2


class Arrival(NamedTuple):
    """One recorded request: seconds from the first, tokens, and blocks or the prompt itself."""

    at_s: float
    input_tokens: int
    output_tokens: int
    blocks: Sequence[int] = ()
    prompt: Prompt | None = None


@dataclass(frozen=True)
class Trace:
    """What a file recorded. ``left_out`` counts requests that were longer than allowed."""

    arrivals: Sequence[Arrival]
    seed: int
    scale: float
    left_out: int

    def asks(self) -> Iterator[Ask]:
        """The requests in their order; prompts are only made when they are asked for."""
        for number, each in enumerate(self.arrivals):
            if each.prompt is not None:
                yield Ask(each.prompt, each.output_tokens, True, None, each.at_s)
                continue
            ids = self._ids(number, each)
            yield Ask(ids, each.output_tokens, True, len(ids), each.at_s)

    def _ids(self, number: int, arrival: Arrival) -> list[int]:
        """Blocks of ids one after the other, cut to the prompt's length, and own ids after them."""
        made: list[int] = []
        for place, block in enumerate(arrival.blocks):
            # Rounded at both ends, blocks of a scaled prompt stand at the same places in all.
            begin, end = (round(BLOCK * self.scale * at) for at in (place, place + 1))
            made += _block_ids(self.seed, block, end - begin)
        missing = arrival.input_tokens - len(made)
        if missing > 0:
            made += ids_of((self.seed, _OWN_SEED, number), missing)
        return made[: arrival.input_tokens]


@lru_cache(_CACHED_BLOCKS)
def _block_ids(seed: int, block: int, count: int) -> list[int]:
    return ids_of((seed, _BLOCK_SEED, block), count)


def read_trace(
    kind: str,
    path: Path,
    *,
    scale: float = 1.0,
    speed_up: float = 1.0,
    longest: int | None = None,
    first: int | None = None,
    seed: int = 0,
) -> Trace:
    """Read ``path``, the ``first`` so many requests of it.

    Args:
        scale: factor on all lengths, blocks included; a length is 1 at least.
        speed_up: divides the time between arrivals.
        longest: tokens of prompt and answer, scaled, above which a request is left out.

    Ends the program where the file is no such trace.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            read = list(itertools.islice(_READERS[kind](file, path.name), first))
    except (OSError, UnicodeDecodeError) as error:
        sys.exit(f"--trace-file {path.name}: cannot be read: {error}")
    if not read:
        sys.exit(f"--trace-file {path.name}: no requests in it")
    read.sort(key=lambda each: each.at_s)
    begin = read[0].at_s
    scaled = [
        each._replace(
            at_s=(each.at_s - begin) / speed_up,
            input_tokens=max(1, round(each.input_tokens * scale)),
            output_tokens=max(1, round(each.output_tokens * scale)),
        )
        for each in read
    ]
    kept = [e for e in scaled if not longest or e.input_tokens + e.output_tokens <= longest]
    if not kept:
        sys.exit(f"--longest {longest}: every request of {path.name} has more tokens")
    return Trace(kept, seed, scale, len(read) - len(kept))


def _azure(file: Iterator[str], name: str) -> Iterator[Arrival]:
    for number, row in enumerate(csv.DictReader(file), 2):
        try:
            at = datetime.fromisoformat(row["TIMESTAMP"])
            tokens = int(row["ContextTokens"]), int(row["GeneratedTokens"])
        except (KeyError, TypeError, ValueError) as error:
            wanted = "TIMESTAMP,ContextTokens,GeneratedTokens"
            sys.exit(f"{name}, line {number}: expected {wanted} ({error!r})")
        yield Arrival(at.timestamp(), *tokens)


def _mooncake(file: Iterator[str], name: str) -> Iterator[Arrival]:
    for row, where in _rows(file, name):
        try:
            blocks = [int(block) for block in row["hash_ids"]]
            tokens = int(row["input_length"]), int(row["output_length"])
            yield Arrival(float(row["timestamp"]) / 1e3, *tokens, blocks)
        except (KeyError, TypeError, ValueError) as error:
            wanted = "timestamp, input_length, output_length and hash_ids"
            sys.exit(f"{where}: expected {wanted} ({error!r})")


def _jsonl(file: Iterator[str], name: str) -> Iterator[Arrival]:
    for row, where in _rows(file, name):
        prompt, output = prompt_of(row), length_of(row) or _DEFAULT_OUTPUT
        try:
            at_s = float(row["timestamp"]) / 1e3
            tokens = 0 if prompt is not None else int(row["input_length"])
        except (KeyError, TypeError, ValueError) as error:
            sys.exit(f"{where}: expected timestamp and input_length or a prompt ({error!r})")
        yield Arrival(at_s, tokens, output, (), prompt)


def _rows(file: Iterator[str], name: str) -> Iterator[tuple[dict[str, Any], str]]:
    for number, line in enumerate(file, 1):
        if line.strip():
            where = f"{name}, line {number}"
            yield read_row(line, where), where


_READERS: Final[dict[str, Callable[[Any, str], Iterator[Arrival]]]] = {
    "azure": _azure,
    "mooncake": _mooncake,
    "jsonl": _jsonl,
}
KINDS: Final = tuple(_READERS)
