"""What the gateway counts about requests, as plain numbers: nothing is done for a single token.

A request is measured at four moments: when it is understood, when it gets its slot, at its first
token and at its end. What grows in between is summed up from the live requests when somebody asks
(``exposition``). Knows no slab, no HTTP and no format.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

_SECONDS: Final = (
    *(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 180.0, 600.0),
)
_TOKEN_SECONDS: Final = (
    *(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05),
    *(0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0),
)
_TOKENS: Final = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
_CHOICES: Final = (1, 2, 5, 10, 20, 50, 100)
_HANDOFFS: Final = (0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)


class Histogram:
    """How many values there were up to each of ``bounds``.

    Attributes:
        counts: of the values up to each bound and above the one before; the last has the rest.
        total: the sum of all values.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count ``value``, as if it had come ``times`` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


def observe_each(histograms: Sequence[Histogram], values: Sequence[float]) -> None:
    """Count one value in each: as that many calls of ``observe``, at less cost."""
    for histogram, value in zip(histograms, values, strict=True):
        histogram.counts[bisect_left(histogram.bounds, value)] += 1
        histogram.total += value


class Metrics:
    """The counts of one gateway.

    Args:
        request_bounds, token_bounds: upper bounds of the histograms of requests' times and of the
            gaps between tokens, in seconds; the usual ones if empty.

    Attributes:
        finished: answers by finish reason (``error`` for those that failed).
        errors: error responses, by HTTP status and code.
        prompt_tokens: of the prompts that got a slot, each once however many answers it has.
        generation_tokens: by model, of the answers that ended.
        handoffs: of the answers that ended.
        threshold_overrides: how often the router's parameters were set, by whom.
        of_admission, of_beginning, of_completion: histograms that are told of the same moment, in
            the order of :class:`Meter`'s values.
    """

    def __init__(
        self,
        models: int,
        request_bounds: Sequence[float] = (),
        token_bounds: Sequence[float] = (),
    ) -> None:
        seconds = request_bounds or _SECONDS
        self.finished: Counter[str] = Counter()
        self.errors: Counter[tuple[int, str]] = Counter()
        self.prompt_tokens = 0
        self.generation_tokens = [0] * models
        self.handoffs = 0
        self.threshold_overrides = {"request": 0, "server": 0}
        self.queue_time = Histogram(seconds)
        self.time_to_first_token = Histogram(seconds)
        self.inter_token_latency = Histogram(token_bounds or _TOKEN_SECONDS)
        self.latency = Histogram(seconds)
        self.prefill_time = Histogram(seconds)
        self.decode_time = Histogram(seconds)
        self.inference_time = Histogram(seconds)
        self.pending_time = Histogram(seconds)
        self.request_prompt_tokens = Histogram(_TOKENS)
        self.request_generation_tokens = Histogram(_TOKENS)
        self.request_handoffs = Histogram(_HANDOFFS)
        self.request_params_n = Histogram(_CHOICES)
        self.request_params_max_tokens = Histogram(_TOKENS)
        self.request_time_per_token = Histogram(token_bounds or _TOKEN_SECONDS)
        self.of_admission = self.queue_time, self.request_params_n
        self.of_beginning = self.time_to_first_token, self.prefill_time
        self.of_completion = (
            self.latency,
            self.decode_time,
            self.inference_time,
            self.pending_time,
            self.request_prompt_tokens,
            self.request_generation_tokens,
            self.request_handoffs,
        )


class Asked(NamedTuple):
    """A request: when it was understood (``time.monotonic``), and what it left open as None."""

    arrived_s: float
    n: int
    max_tokens: int | None


class Times(NamedTuple):
    """An answer's moments (``time.monotonic``), 0 for those that it did not come to."""

    arrived_s: float
    admitted_s: float
    first_s: float
    ended_s: float


class Meter:
    """Measures one answer.

    Args:
        metrics: where it is counted.
        prompt_tokens: how long its prompt is.
        counts_prompt: whether it is the first answer to its prompt.
        asked: what is known of its request.
    """

    __slots__ = (
        "_admitted_s",
        "_arrived_s",
        "_asked",
        "_counts_prompt",
        "_ended_s",
        "_first_s",
        "_metrics",
        "_prompt_tokens",
    )

    def __init__(
        self, metrics: Metrics, prompt_tokens: int, asked: Asked, *, counts_prompt: bool
    ) -> None:
        self._metrics = metrics
        self._prompt_tokens = prompt_tokens
        self._counts_prompt = counts_prompt
        self._asked = asked
        self._arrived_s = asked.arrived_s
        self._admitted_s = self._first_s = self._ended_s = 0.0

    @property
    def times(self) -> Times:
        """What it measured so far."""
        return Times(self._arrived_s, self._admitted_s, self._first_s, self._ended_s)

    def deadline_ns(self, timeout_s: float | None) -> int:
        """When the request's time is over (``time.monotonic_ns``); 0 for never."""
        return 0 if timeout_s is None else int((self._arrived_s + timeout_s) * 1e9)

    def admit(self) -> None:
        """It has its slot."""
        metrics = self._metrics
        self._admitted_s = time.monotonic()
        waited_s, asked = self._admitted_s - self._arrived_s, self._asked
        if not self._counts_prompt:
            metrics.queue_time.observe(waited_s)
            return
        metrics.prompt_tokens += self._prompt_tokens
        observe_each(metrics.of_admission, (waited_s, asked.n))
        if asked.max_tokens is not None:
            metrics.request_params_max_tokens.observe(asked.max_tokens)

    def begin(self) -> None:
        """Its first token is there."""
        self._first_s = now = time.monotonic()
        observe_each(self._metrics.of_beginning, (now - self._arrived_s, now - self._admitted_s))

    def end(self, reason: str, counts: Sequence[int], handoffs: int) -> None:
        """It has ended with ``counts`` tokens of each model."""
        metrics = self._metrics
        self._ended_s = time.monotonic()
        metrics.finished[reason] += 1
        metrics.handoffs += handoffs
        for model, tokens in enumerate(counts):
            metrics.generation_tokens[model] += tokens

    def complete(self, tokens: int, handoffs: int, pending_s: float) -> None:
        """Beside :meth:`end`: it was answered as it was asked for, with ``tokens`` tokens."""
        metrics, now = self._metrics, self._ended_s
        observe_each(
            metrics.of_completion,
            (
                now - self._arrived_s,
                now - self._first_s if self._first_s else 0.0,
                now - self._admitted_s,
                pending_s,
                self._prompt_tokens,
                tokens,
                handoffs,
            ),
        )
        if tokens > 1:
            gap_s = (now - self._first_s) / (tokens - 1)
            metrics.inter_token_latency.observe(gap_s, tokens - 1)
            metrics.request_time_per_token.observe(gap_s)
