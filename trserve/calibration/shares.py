"""How much of some answers was not the first model's, and how sure that is. Knows no router."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Share:
    """``others[i]`` of the ``tokens[i]`` tokens of answer i were not written by the first model."""

    others: Sequence[int]
    tokens: Sequence[int]

    @property
    def value(self) -> float:
        """All of the others' tokens over all tokens, as ``usage`` counts them; NaN for none."""
        total = sum(self.tokens)
        return sum(self.others) / total if total else math.nan

    @property
    def standard_error(self) -> float:
        """Of :attr:`value`, over prompts drawn as these were: the tokens of an answer are alike.

        The ratio estimator's; NaN for fewer than two answers.
        """
        count = len(self.tokens)
        if count < 2:
            return math.nan
        deviations = np.array(self.others) - self.value * np.array(self.tokens)
        variance = float(np.sum(deviations**2)) * count / (count - 1)
        return math.sqrt(variance) / sum(self.tokens)
