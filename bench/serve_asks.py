"""What is asked: prompts of random ids, and those of files in ShareGPT's format or as JSON lines.

Files are read by path and checked as a whole before anything is sent. Knows no server; arrival
times only as a member that traces fill in (``bench.serve_traces``).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from bench.workloads import TOKEN_IDS

FIRST_ID: Final = 16
LETTERS_A_TOKEN: Final = 4
"""By which a ShareGPT answer's length is estimated: there is no tokenizer here."""

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]


class Ask(NamedTuple):
    """One request: text, token ids or messages; ``at_s`` is the recorded arrival, if any.

    ``prompt_tokens`` is what the client knows of the prompt's length; None: only the server does.
    """

    prompt: Prompt
    max_tokens: int
    ignore_eos: bool
    prompt_tokens: int | None = None
    at_s: float | None = None


def ids_of(seed: Sequence[int], count: int) -> list[int]:
    """``count`` random token ids; the same for the same seed."""
    drawn: list[int] = np.random.default_rng(seed).integers(FIRST_ID, TOKEN_IDS, count).tolist()
    return drawn


def random_asks(input_len: int, output_len: int, *, seed: int, spread: float) -> Iterator[Ask]:
    """Without end: prompts of random ids, of which no two begin alike.

    Lengths are uniform within ``spread`` (a share of each) around what is given.
    """
    dice = np.random.default_rng(seed)
    number = 0
    while True:
        length, output = (
            int(dice.integers(max(1, round(n * (1 - spread))), max(1, round(n * (1 + spread))) + 1))
            for n in (input_len, output_len)
        )
        yield Ask(ids_of((seed, number), length), output, True, length)
        number += 1


def read_dataset(path: Path, output_len: int | None, default_len: int) -> list[Ask]:
    """The requests of a file: a JSON list is ShareGPT's format, else it is JSON lines.

    ``output_len`` is that of all answers, exactly; without it a line's own, which is a limit
    (``default_len`` where it has none). Ends the program where the file holds no requests.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        sys.exit(f"--dataset {path.name}: cannot be read: {error}")
    if text.lstrip().startswith("["):
        found = _sharegpt(text, path.name)
    else:
        lines = enumerate(text.splitlines(), 1)
        found = [_of_line(line, f"{path.name}, line {at}") for at, line in lines if line.strip()]
    if not found:
        sys.exit(f"--dataset {path.name}: no requests in it")
    if output_len is not None:
        return [Ask(prompt, output_len, True) for prompt, _ in found]
    return [Ask(prompt, length or default_len, False) for prompt, length in found]


def prompt_of(row: Mapping[str, Any]) -> Prompt | None:
    """The prompt in a row: ``messages``, ``prompt``, ``text_input`` or ``question``; or None."""
    for name in ("messages", "prompt", "text_input", "question"):
        found = row.get(name)
        if isinstance(found, str) or (found and isinstance(found, list)):
            return found
    return None


def length_of(row: Mapping[str, Any]) -> int | None:
    """How long the answer shall be, in tokens, where the row says so."""
    for name in ("output_len", "output_length", "output_tokens", "max_tokens"):
        if isinstance(row.get(name), int) and row[name] > 0:
            return int(row[name])
    return None


def _of_line(line: str, where: str) -> tuple[Prompt, int | None]:
    row = read_row(line, where)
    prompt = prompt_of(row)
    if prompt is None:
        sys.exit(f"{where}: has no prompt, messages, text_input or question")
    return prompt, length_of(row)


def read_row(line: str, where: str) -> dict[str, Any]:
    """The object in a line; ends the program where it is none."""
    try:
        row = json.loads(line)
    except ValueError as error:
        sys.exit(f"{where}: no JSON: {error}")
    if not isinstance(row, dict):
        sys.exit(f"{where}: expected an object")
    return row


def _sharegpt(text: str, name: str) -> list[tuple[Prompt, int | None]]:
    """The first question of every conversation that has an answer to it, whose length counts."""
    try:
        conversations = json.loads(text)
    except ValueError as error:
        sys.exit(f"{name}: no JSON: {error}")
    found: list[tuple[Prompt, int | None]] = []
    for entry in conversations:
        turns = entry.get("conversations") if isinstance(entry, dict) else None
        if not turns or len(turns) < 2:
            continue
        question, answer = (str(turn.get("value", "")) for turn in turns[:2])
        if question and answer:
            found.append((question, -(-len(answer) // LETTERS_A_TOKEN)))
    return found
