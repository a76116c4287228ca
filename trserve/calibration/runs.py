"""Answering prompts under thresholds, with the real router in a real server's workers.

Knows the engine; not which threshold is tried next.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from trserve.calibration.shares import Share
from trserve.engine import Completion, Engine, SamplingParams
from trserve.errors import ConfigError
from trserve.router_lib.parameters import Parameter

_TRACED: Final = 48
"""Prompts whose scores are asked for at a time: annotations have room for so many."""
_FARTHEST: Final = 20
"""How often a bound that is not stated is moved on, twice as far each time."""


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn; prompt i has the seed i, so that runs differ by the threshold only."""

    max_tokens: int
    temperature: float


class Runs:
    """Runs of one engine; ``parameter`` is the first number that a request may set.

    Raises:
        ConfigError: the router has no such number.
    """

    def __init__(self, engine: Engine, router: str, sampling: Sampling) -> None:
        self._engine = engine
        self._sampling = sampling
        self.parameter = _first(engine.router_parameters, router)

    def share(self, prompts: Sequence[Any], threshold: float) -> Share:
        """The share over ``prompts``."""
        return _share(self._answers(prompts, threshold, trace=False))

    def scored(self, prompts: Sequence[Any], threshold: float) -> tuple[Share, list[float]]:
        """The same, and the scores of the tokens that the first model wrote."""
        answers = [
            answer
            for start in range(0, len(prompts), _TRACED)
            for answer in self._answers(prompts[start : start + _TRACED], threshold, trace=True)
        ]
        return _share(answers), [score for answer in answers for score in _own_scores(answer)]

    def _answers(
        self, prompts: Sequence[Any], threshold: float, *, trace: bool
    ) -> list[Completion]:
        sampling = self._sampling
        params = [
            SamplingParams(
                max_tokens=sampling.max_tokens, temperature=sampling.temperature, seed=seed
            )
            for seed in range(len(prompts))
        ]
        extension = {"router": {self.parameter.name: threshold}, "trace": trace}
        answers = self._engine.generate(list(prompts), params, trserve=extension)
        assert isinstance(answers, list)
        return answers


def ends(runs: Runs, prompts: Sequence[Any]) -> tuple[Ends, list[float]]:
    """The thresholds of the least and of the largest share, with the scores at the former."""
    parameter = runs.parameter
    low, high = _bounds(parameter)
    at_low, scores_low = runs.scored(prompts, low)
    at_high, scores_high = runs.scored(prompts, high)
    for _ in range(_FARTHEST):
        if math.isfinite(parameter.maximum) or max(at_low.value, at_high.value) > 0.99:
            break
        high *= 2
        at_high, scores_high = runs.scored(prompts, high)
    if at_low.value <= at_high.value:
        return Ends(low, high, at_low.value, at_high.value), scores_low
    return Ends(high, low, at_high.value, at_low.value), scores_high


@dataclass(frozen=True)
class Ends:
    """The thresholds of the least and of the largest share, and these shares."""

    least: float
    most: float
    least_share: float
    most_share: float


def _bounds(parameter: Parameter) -> tuple[float, float]:
    usual = 1.0 if parameter.default is None else parameter.default
    far = max(1.0, abs(usual))
    low = parameter.minimum if math.isfinite(parameter.minimum) else usual - far
    high = parameter.maximum if math.isfinite(parameter.maximum) else max(low, usual) + far
    return low, high


def _first(parameters: Sequence[Parameter], router: str) -> Parameter:
    found = next((each for each in parameters if each.per_request), None)
    if found is None:
        raise ConfigError(
            f"calibrate --router {router}: it has no number that a request may set, so there is "
            "nothing to calibrate"
        )
    return found


def _share(answers: Sequence[Completion]) -> Share:
    return Share(
        others=[sum(source != 0 for source in answer.sources) for answer in answers],
        tokens=[len(answer.sources) for answer in answers],
    )


def _own_scores(answer: Completion) -> list[float]:
    scores = zip(answer.sources, answer.scores or (), strict=False)
    return [score for source, score in scores if source == 0 and score is not None]
