"""Training batches: problems and drills as token ids with the positions that carry loss.

Data is generated on the fly and never repeated. Knows tensors and the tokenizer, no model.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from tokenizers import Tokenizer

from trserve.demo.grammar import Problem, drill_document, first_message, training_example
from trserve.demo.tokenizer_build import IM_END, IM_START, MAX_CONTEXT, PAD_ID

BATCH: Final = 32
POOL_BATCHES: Final = 24
IGNORED: Final = -100
GAP_SHARE: Final = 0.5
"""Share of the conversations whose later turns stand further back than their length says."""

Segment = tuple[str, bool]
"""A piece of text and whether its tokens carry loss."""


@dataclass(frozen=True, slots=True)
class Batch:
    """``ids``, ``labels`` (-100 where no loss) and ``positions``, each (rows, length) int64."""

    ids: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Document:
    ids: list[int]
    labels: list[int]
    gap: tuple[int, int]
    """Index of a token, and how many positions are skipped before it."""


def problem_segments(problem: Problem) -> list[Segment]:
    """The ChatML of a whole conversation; every answer and its <|im_end|> carries loss.

    Segments begin and end at special tokens or line ends, where the tokenizer splits too, so
    their encodings concatenate to the encoding of the whole text.
    """
    segments: list[Segment] = []
    if problem.system is not None:
        segments.append((f"{IM_START}system\n{problem.system}{IM_END}\n", False))
    for question, answer in (*problem.history, (problem.question, problem.answer)):
        prompt = f"{IM_START}user\n{question}{IM_END}\n{IM_START}assistant\n"
        segments += [(prompt, False), (f"{answer}{IM_END}", True), ("\n", False)]
    return segments[:-1]


def drill_segments(operations: list[tuple[str, str]]) -> list[Segment]:
    """A drill document; the operands are noise that nothing could predict, so they carry none."""
    segments: list[Segment] = [(f"{IM_START}assistant\n", False)]
    for index, (asked, result) in enumerate(operations):
        segments += [(f"{' ' if index else ''}{asked} ", False), (f"{result}.", True)]
    return segments


def encode(
    segments: list[Segment], tokenizer: Tokenizer, gap_at: int = 0, gap: int = 0
) -> _Document:
    """Token ids and labels of ``segments``; ``gap`` positions are skipped before one of them."""
    ids: list[int] = []
    labels: list[int] = []
    token = 0
    for index, (text, learnt) in enumerate(segments):
        if index == gap_at:
            token = len(ids)
        piece = tokenizer.encode(text, add_special_tokens=False).ids
        ids += piece
        labels += piece if learnt else [IGNORED] * len(piece)
    return _Document(ids, labels, (token, min(gap, MAX_CONTEXT - len(ids))))


def collate(documents: list[_Document]) -> Batch:
    """Right-padded tensors. Padding needs no mask: attention is causal and it carries no loss."""
    rows, length = len(documents), max(len(d.ids) for d in documents)
    ids = torch.full((rows, length), PAD_ID)
    labels = torch.full((rows, length), IGNORED)
    positions = torch.arange(length).repeat(rows, 1)
    for row, document in enumerate(documents):
        size = len(document.ids)
        ids[row, :size] = torch.tensor(document.ids)
        labels[row, :size] = torch.tensor(document.labels)
        start, gap = document.gap
        positions[row, start:] += gap
    return Batch(ids, labels, positions)


def problem_batches(problems: list[Problem], tokenizer: Tokenizer) -> Iterator[Batch]:
    """``problems`` in order, for teacher-forced evaluation."""
    documents = [encode(problem_segments(p), tokenizer) for p in problems]
    for start in range(0, len(documents), BATCH):
        yield collate(documents[start : start + BATCH])


class TrainingStream:
    """Endless batches of ``BATCH`` documents of similar length.

    Rotary attention sees only distances, so a constant shift of the positions teaches nothing.
    What a long chat brings that a short one does not is distance to the earlier turns: half of
    the conversations therefore skip a random number of positions before a later turn, up to the
    whole context. ``drill`` and ``first`` are the shares of drills and of first messages;
    ``drill`` may be changed at any time.
    """

    def __init__(self, tokenizer: Tokenizer, seed: int, drill: float, first: float = 0.0) -> None:
        self.drill = drill
        self._first = first
        self.tokenizer = tokenizer
        self._rng = random.Random(1000 + seed)

    def __iter__(self) -> Iterator[Batch]:
        while True:
            pool = [self._document() for _ in range(POOL_BATCHES * BATCH)]
            pool.sort(key=lambda d: len(d.ids))
            batches = [pool[i : i + BATCH] for i in range(0, len(pool), BATCH)]
            self._rng.shuffle(batches)
            yield from map(collate, batches)

    def _document(self) -> _Document:
        rng = self._rng
        if rng.random() < self.drill:
            return encode(drill_segments(drill_document(rng)), self.tokenizer)
        opening = self._first > 0.0 and rng.random() < self._first
        problem = first_message(rng) if opening else training_example(rng)
        segments = problem_segments(problem)
        if not problem.history or rng.random() >= GAP_SHARE:
            return encode(segments, self.tokenizer)
        later_turn = rng.randint(1, len(problem.history))
        first = 1 if problem.system is not None else 0
        return encode(segments, self.tokenizer, first + 3 * later_turn, rng.randint(0, MAX_CONTEXT))
