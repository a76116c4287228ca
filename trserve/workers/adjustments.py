"""What a request's own parameters add to or take from its logits: biases and penalties.

Knows token ids and counts; nothing of requests, steps or how a token is then drawn. What is kept
of a row is sparse and a function of the parameters and the row alone, so that it is the same in
any worker, whatever the request went through.

The repetition penalty is that of Keskar et al., "CTRL: a conditional transformer language model
for controllable generation" (2019), section 4.1, in the form for logits of both signs that
transformers gave it; the other two are those of OpenAI's API reference.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from trserve.params import SamplingParams

_Float32Array = npt.NDArray[np.float32]
_Int64Array = npt.NDArray[np.int64]

_FIRST_CAPACITY = 64


class Adjustment:
    """Biases and penalties of one request, and the tokens that its row holds.

    ``ids`` are the distinct tokens that a penalty touches, in order of their first appearance, and
    ``counts`` how often each stands in the output. The prompt counts for the repetition penalty
    only, so it is left out where there is none.
    """

    def __init__(self, sampling: SamplingParams, prompt_len: int) -> None:
        self.repetition = sampling.repetition_penalty
        self.presence = sampling.presence_penalty
        self.frequency = sampling.frequency_penalty
        self.bias_ids: _Int64Array = np.array(list(sampling.logit_bias), np.int64)
        self.biases: _Float32Array = np.array(list(sampling.logit_bias.values()), np.float32)
        self.penalises = self.repetition != 1.0 or self.presence != 0.0 or self.frequency != 0.0
        self._prompt_len = prompt_len
        self._seen = 0 if self.repetition != 1.0 else prompt_len
        self._place: dict[int, int] = {}
        self._ids: _Int64Array = np.empty(_FIRST_CAPACITY, np.int64)
        self._counts: _Float32Array = np.empty(_FIRST_CAPACITY, np.float32)

    @classmethod
    def of(cls, sampling: SamplingParams, prompt_len: int) -> Adjustment | None:
        """The adjustment that ``sampling`` asks for, or None where it asks for none."""
        adjustment = cls(sampling, prompt_len)
        return adjustment if adjustment.penalises or len(adjustment.bias_ids) else None

    @property
    def ids(self) -> _Int64Array:
        """int64 [N], distinct."""
        return self._ids[: len(self._place)]

    @property
    def counts(self) -> _Float32Array:
        """float32 [N], occurrences in the output."""
        return self._counts[: len(self._place)]

    def advance(self, row: npt.NDArray[np.integer]) -> Adjustment:
        """Take in what ``row`` (all committed tokens) has beyond what was seen; returns self."""
        if self.penalises and self._seen < len(row):
            for token in row[self._seen : self._prompt_len].tolist():
                self._find(token)
            for token in row[max(self._seen, self._prompt_len) :].tolist():
                place = self._find(token)  # first: it may replace the array
                self._counts[place] += 1.0
            self._seen = len(row)
        return self

    def _find(self, token: int) -> int:
        """The place of ``token``, made if it has none."""
        place = self._place.get(token)
        if place is None:
            place = self._place[token] = len(self._place)
            if place == len(self._ids):
                self._ids = np.concatenate((self._ids, np.empty_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.empty_like(self._counts)))
            self._ids[place], self._counts[place] = token, 0.0
        return place


def add_biases(logits: _Float32Array, rows: Sequence[tuple[int, Adjustment]]) -> None:
    """Add each row's biases to ``logits`` [B, V], in place."""
    biased = [(row, each) for row, each in rows if len(each.bias_ids)]
    if biased:
        at = _index([(row, each.bias_ids) for row, each in biased])
        logits[at] += np.concatenate([each.biases for _, each in biased])


def penalise(logits: _Float32Array, rows: Sequence[tuple[int, Adjustment]]) -> None:
    """Apply each row's repetition, then frequency and presence penalties, in place.

    A token that the row holds has its logit divided by the repetition penalty if it is positive
    and multiplied by it if not; then ``frequency * count`` and, if it stands in the output at all,
    ``presence`` are taken off. Minus infinity stays what it is.
    """
    penalised = [(row, each) for row, each in rows if len(each.ids)]
    if not penalised:
        return
    lengths = [len(each.ids) for _, each in penalised]
    settings = np.array(
        [(each.repetition, each.frequency, each.presence) for _, each in penalised], np.float32
    )
    repetition, frequency, presence = settings.repeat(lengths, axis=0).T
    counts = np.concatenate([each.counts for _, each in penalised])
    at = _index([(row, each.ids) for row, each in penalised])
    values = logits[at]
    values = np.where(values > 0, values / repetition, values * repetition)
    values -= frequency * counts
    values -= presence * (counts > 0)
    logits[at] = values


def _index(rows: Sequence[tuple[int, _Int64Array]]) -> tuple[_Int64Array, _Int64Array]:
    """Row and column of every entry of ``rows``."""
    lengths = [len(ids) for _, ids in rows]
    numbers = np.array([row for row, _ in rows]).repeat(lengths)
    return numbers, np.concatenate([ids for _, ids in rows])
