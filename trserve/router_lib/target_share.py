"""Keeping a share of tokens while serving: the server's threshold follows what was written.

In the first model's worker alone. The threshold is the quantile of recent scores beyond which a
fraction x of the steps lies. x is what the wanted share takes, given how long visits to the other
models have been, plus an integral term: the tokens that the others are behind by. All counts are
those of the workers' tallies, so the share is the whole server's.

What a request gets depends on what others were served before it: under a target share, no request
is reproducible. One that sets the threshold for itself is left alone, but counts. Knows no router.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trserve.errors import ConfigError
from trserve.router_lib.base import BaseRouter, StepResult
from trserve.router_lib.registry import TARGET_SHARE

_WINDOW: Final = 2048
"""Scores that are remembered."""
_FIRST: Final = 64
"""Scores before the threshold is moved at all."""
_ALL_OF: Final = 512
"""Scores until every step is asked for its own; from then on every so many steps."""
_SAMPLED_STEPS: Final = 4
_MOVE_TOKENS: Final = 16
"""Tokens of the server between two moves of the threshold."""
_REPAID_TOKENS: Final = 200.0
"""Tokens over which the others catch up with what they are behind by."""
_USUAL_TOKENS: Final = 400.0
"""Tokens over which it becomes usual that so many requests are away: what is always under way is
never counted, and would be missing from the share for good."""
_FORGOTTEN_TOKENS: Final = 2000
"""Tokens after which a request that left and did not come back has ended where it went."""
_MOST_AWAY: Final = 4096
"""Requests away that are remembered, the oldest being given up: nothing else does that while no
threshold is moved, as where every request has its own."""
_REMEMBERED_TOKENS: Final = 8000.0
"""Tokens after which a debt, or how long visits were, has faded to a third."""
_PRIOR_VISITS: Final = 8.0
"""Visits of one token that are believed in before any was seen."""

Scores = Callable[[StepResult], Sequence[float] | None]


class ShareControl:
    """The control of one server.

    Args:
        target: the wanted share of tokens that other models than the first write, 0 to 1.
        router: the first model's; its ``above`` says on which side of its first parameter it hands
            a token on.
        tallies: every worker's words, as :mod:`trserve.ipc.tally` lays them out.

    Attributes:
        threshold: in force for requests without one of their own; None: still the configured one.
    """

    def __init__(self, target: float, router: BaseRouter, tallies: Sequence[memoryview]) -> None:
        first = router.parameters[0]
        self.threshold: float | None = None
        self.name = first.name
        self._never = first.maximum if router.above else first.minimum
        self._above = bool(router.above)
        self._target = target
        self._tallies = tallies
        self._before = self._counts()
        self._scores = np.empty(_WINDOW)
        self._num_scores = 0
        self._num_steps = 0
        self._debt = 0.0
        self._visits = self._visit_tokens = _PRIOR_VISITS
        self._kept = 0.0
        self._tokens = 0
        self._away: dict[int, int] = {}  # how many tokens there were when a request left
        self._usually_away = 0.0

    def adjust(self, result: StepResult, scores: Scores) -> None:
        """Before the router is asked about ``result``: put the threshold in it."""
        for request in result.requests:
            self._away.pop(request.rid, None)
        rows = [r for r, each in enumerate(result.requests) if self.name not in each.params.router]
        if not rows:
            return
        self._num_steps += 1
        if self._num_scores < _ALL_OF or self._num_steps % _SAMPLED_STEPS == 0:
            self._remember(scores(result), rows)
        if self._num_scores >= _FIRST:
            self._move()
        if self.threshold is not None:
            values = result.params[self.name]
            if len(rows) == len(values):
                values.fill_(self.threshold)
            else:
                values[rows] = self.threshold

    def note(self, result: StepResult, destinations: Sequence[int | None]) -> None:
        """What it said: what leaves will be written elsewhere before any tally says so."""
        for request, destination in zip(result.requests, destinations, strict=True):
            if destination:
                self._away[request.rid] = self._tokens
        while len(self._away) > _MOST_AWAY:
            del self._away[next(iter(self._away))]

    def _remember(self, scores: Sequence[float] | None, rows: Sequence[int]) -> None:
        if scores is None:
            return
        for row in rows:
            if np.isfinite(scores[row]):
                self._scores[self._num_scores % _WINDOW] = scores[row]
                self._num_scores += 1

    def _counts(self) -> NDArray[np.int64]:
        """Tokens of the first model, tokens of the others; handoffs of the first model, and the
        tokens that it kept at them."""
        size = len(self._tallies)
        words = np.array([tally[: 2 * size].tolist() for tally in self._tallies], np.int64)
        moved, committed = words[:, :size], words[:, size:]
        return np.array(
            [
                committed[0].sum(),
                committed[1:].sum(),
                moved[0, 1:].sum(),
                committed[0, 1:].sum(),
            ]
        )

    def _move(self) -> None:
        counts = self._counts()
        own, others, visits, kept = (counts - self._before).tolist()
        tokens = own + others
        if self.threshold is not None and tokens < _MOVE_TOKENS:
            return
        self._before = counts
        fade = np.exp(-tokens / _REMEMBERED_TOKENS)
        self._debt = fade * self._debt + self._target * tokens - others
        self._visits = fade * self._visits + visits
        self._visit_tokens = fade * self._visit_tokens + others
        self._kept = fade * self._kept + kept
        self._tokens += tokens
        self._forget()
        steady = np.exp(-tokens / _USUAL_TOKENS)
        self._usually_away = steady * self._usually_away + (1 - steady) * len(self._away)
        behind = self._debt - (len(self._away) - self._usually_away) * self._visit_length
        self._set(self._fraction() + behind / _REPAID_TOKENS)

    def _forget(self) -> None:
        before = self._tokens - _FORGOTTEN_TOKENS
        for rid in [rid for rid, left in self._away.items() if left < before]:
            del self._away[rid]

    @property
    def _visit_length(self) -> float:
        """Tokens of others for each handoff; those under way are not in the sum yet."""
        return max(1.0, self._visit_tokens / max(self._visits, 1e-9))

    def _fraction(self) -> float:
        """The fraction of the first model's steps that has to be handed on, as visits are.

        Handing on a fraction x of its steps yields x v tokens of the others for 1 - x + x c of its
        own: v tokens a visit, and c of the tokens at which it hands on are kept.
        """
        target, kept = self._target, self._kept / max(self._visits, 1e-9)
        return target / (self._visit_length * (1 - target) + target * (1 - kept))

    def _set(self, fraction: float) -> None:
        if fraction <= 0.0:
            self.threshold = float(self._never)
            return
        scores = self._scores[: min(self._num_scores, _WINDOW)]
        fraction = min(fraction, 1.0)
        self.threshold = float(np.quantile(scores, 1 - fraction if self._above else fraction))


def share_control(router: BaseRouter, tallies: Sequence[memoryview]) -> ShareControl | None:
    """The control that the configuration asks for, in the first model's worker.

    Raises:
        ConfigError: the router has no threshold that could be moved, or no score.
    """
    target = float(router.context.config.get(TARGET_SHARE.name, 0.0))
    if router.model != 0 or target <= 0.0:
        return None
    if router.above is None or not router.parameters:
        raise ConfigError(
            f"--router-config {TARGET_SHARE.name}={target:g}: {type(router).__name__} does not say "
            "in `above` on which side of its first parameter it hands a token on"
        )
    return ShareControl(target, router, tallies)
