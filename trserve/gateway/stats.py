"""What happened between two looks at the server: rates, shares, percentiles, widths of steps.

Looks are taken of sums that the gateway and the workers keep anyway (``/metrics`` shows the same),
and nothing is counted for them. Knows no HTTP and no clock but the one of its looks.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trserve.gateway.dispatcher import Dispatcher
from trserve.gateway.metrics import Histogram
from trserve.gateway.service import Service
from trserve.ipc.estimates import read_report
from trserve.ipc.slab import Slab
from trserve.ipc.tally import read_tally

WINDOW: Final = 60
"""Looks over which latencies are summed up: a minute's, at one a second."""
_QUANTILES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
_OPENINGS: Final = {
    "threshold": "gate_threshold",
    "nobody-runs": "gate_nobody_runs",
    "timeout": "gate_timeout",
    "drain": "gate_drain",
}
_WIDTHS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_MS: Final = 1e3


class Look(NamedTuple):
    """Sums at one moment; lists go by model, ``times`` by histogram of :data:`Stats.times`."""

    at_s: float
    tokens: list[int]
    handoffs: int
    finished: int
    steps: list[NDArray[np.int64]]
    openings: list[dict[str, int]]
    times: list[list[int]]


class Stats:
    """Looks at one server.

    Args:
        service, slab, dispatcher: where the sums are.
    """

    def __init__(self, service: Service, slab: Slab, dispatcher: Dispatcher) -> None:
        self._service = service
        self._slab = slab
        self._dispatcher = dispatcher
        self._looks: deque[Look] = deque(maxlen=WINDOW + 1)

    @property
    def _times(self) -> dict[str, Histogram]:
        metrics = self._service.metrics
        return {
            "queue": metrics.queue_time,
            "first_token": metrics.time_to_first_token,
            "between_tokens": metrics.inter_token_latency,
            "request": metrics.latency,
        }

    def reset(self) -> None:
        """Forget the looks: nobody looked for a while."""
        self._looks.clear()

    def take(self, now_s: float) -> dict[str, Any]:
        """Look now; what changed since the last look, or zeros of a first one."""
        look = self._look(now_s)
        before = self._looks[-1] if self._looks else look
        self._looks.append(look)
        elapsed_s = max(look.at_s - before.at_s, 1e-3)
        written = [new - old for new, old in zip(look.tokens, before.tokens, strict=True)]
        total = sum(written)
        return {
            "interval_s": round(look.at_s - before.at_s, 3),
            "tokens_per_s": round(total / elapsed_s, 2),
            "share": round(1 - written[0] / total, 4) if total > 0 else None,
            "requests_per_s": round((look.finished - before.finished) / elapsed_s, 2),
            "handoffs_per_s": round((look.handoffs - before.handoffs) / elapsed_s, 2),
            "predicted_tokens_per_s": round(read_report(self._slab).predicted_tokens_per_s, 2),
            "requests": {
                "live": self._dispatcher.num_live,
                "waiting": self._dispatcher.num_waiting,
            },
            "latency_ms": self._latencies(look),
            "models": [
                self._model(model, before, look, elapsed_s) for model in range(len(look.tokens))
            ],
        }

    def _look(self, now_s: float) -> Look:
        metrics, models = self._service.metrics, range(len(self._service.model_names))
        live = [generation for generation in self._dispatcher.live if not generation.ended]
        return Look(
            at_s=now_s,
            tokens=[
                metrics.generation_tokens[model] + sum(each.counts[model] for each in live)
                for model in models
            ],
            handoffs=metrics.handoffs + sum(each.handoffs for each in live),
            finished=sum(metrics.finished.values()),
            steps=[read_tally(self._slab, model).steps for model in models],
            openings=[
                {reason: words.get(word) for reason, word in _OPENINGS.items()}
                for words in self._slab.workers
            ],
            times=[list(each.counts) for each in self._times.values()],
        )

    def _latencies(self, look: Look) -> dict[str, Any]:
        """Percentiles of the last :data:`WINDOW` looks, in milliseconds."""
        first, found = self._looks[0], {}
        for (name, histogram), new, old in zip(
            self._times.items(), look.times, first.times, strict=True
        ):
            counts = [after - before for after, before in zip(new, old, strict=True)]
            found[name] = {"count": sum(counts)} | {
                label: _rounded_ms(quantile(histogram.bounds, counts, share))
                for label, share in _QUANTILES.items()
            }
        return found

    def _model(self, model: int, before: Look, look: Look, elapsed_s: float) -> dict[str, Any]:
        words = self._slab.workers[model]
        steps = look.steps[model] - before.steps[model]
        number = int(steps.sum())
        total = words.get("total_blocks")
        # Before a worker has loaded it has said nothing of its blocks.
        said = words.get("free_blocks") + words.get("cached_blocks")
        used = total - said if said or words.get("running") + words.get("pending") else 0
        return {
            "name": self._service.model_names[model],
            "status": self._service.states.status(model),
            "tokens_per_s": round((look.tokens[model] - before.tokens[model]) / elapsed_s, 2),
            "running": words.get("running"),
            "pending": words.get("pending"),
            "steps_per_s": round(number / elapsed_s, 2),
            "rows_mean": round(float(steps @ np.arange(len(steps))) / number, 2)
            if number
            else None,
            "rows": by_width(steps),
            "batch_threshold": words.get("batch_threshold"),
            "openings": {
                reason: count - before.openings[model][reason]
                for reason, count in look.openings[model].items()
            },
            "kv_used": round(used / total, 4) if total else 0.0,
        }


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """The value below which ``share`` of a histogram's values lie, even within each bucket.

    ``counts`` [len(bounds) + 1]; what lies above all bounds counts as the last of them. None of
    an empty histogram.
    """
    total = sum(counts)
    if not total:
        return None
    wanted = share * total
    for index, upto in enumerate(itertools.accumulate(counts)):
        if upto >= wanted and counts[index]:
            if index == len(bounds):
                break
            below = bounds[index - 1] if index else 0.0
            part = (wanted - (upto - counts[index])) / counts[index]
            return below + (bounds[index] - below) * max(part, 0.0)
    return bounds[-1]


def by_width(steps: NDArray[np.int64]) -> dict[str, int]:
    """Steps by number of rows, int64 [1 + S], in classes named by the most rows in each."""
    upto = np.cumsum(steps)
    found, counted = {}, int(upto[0])
    for most in _WIDTHS:
        reached = int(upto[min(most, len(upto) - 1)])
        found[str(most)], counted = reached - counted, reached
    found["more"] = int(upto[-1]) - counted
    return {name: count for name, count in found.items() if count}


def _rounded_ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * _MS, 3)
