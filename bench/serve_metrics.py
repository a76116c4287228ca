"""What latencies are, and the row that is made of a run's answers.

TTFT: from sending a request to its first event with text. ITL: between two such events, of all
answers together; an event may bring several tokens, and ``itl_token`` shares its gap among them.
E2E: from sending to the last event with a choice. TPOT: (E2E - TTFT) / (n - 1) of an answer of n
tokens. Tokens are the server's count where it gives one, else events with text. Goodput: answers a
second that keep to every limit. Failed answers are in no latency. Knows no clients and no files.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from bench.closed_loop import Counts, relative_error
from bench.common import Row
from bench.serve_stream import Answer

LATENCIES: Final = ("ttft", "tpot", "itl", "itl_token", "e2e")
LIMITED: Final = ("ttft", "tpot", "e2e")
"""Latencies of which an answer has one, so that goodput can be of them."""
POINTS: Final = ("p50", "p90", "p99")
_BATCH_S: Final = 0.5
_KINDS_OF_ERRORS: Final = 5
_ERROR_LETTERS: Final = 160

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Sample:
    """The latencies of one whole answer, in milliseconds; ``tpot`` only with two tokens or more."""

    tokens: int
    ttft: float
    e2e: float
    tpot: float | None
    itl: Floats
    itl_token: Floats

    def keeps(self, limits: Mapping[str, float]) -> bool:
        """Whether every limit, in milliseconds by the latency's name, is kept."""
        found = ((getattr(self, name), most) for name, most in limits.items())
        return all(value is None or value <= most for value, most in found)


def sample_of(answer: Answer) -> Sample:
    """The latencies of an answer that came whole."""
    came = np.array(answer.text_s or [answer.ended_s]) * 1e3
    tokens = tokens_of(answer)
    ttft, e2e = (at - answer.sent_s * 1e3 for at in (came[0], answer.ended_s * 1e3))
    tpot = (e2e - ttft) / (tokens - 1) if tokens > 1 else None
    gaps = np.diff(came)
    return Sample(tokens, float(ttft), float(e2e), tpot, gaps, _by_token(answer, gaps, tokens))


def tokens_of(answer: Answer) -> int:
    """How many tokens were written."""
    counted = (answer.usage or {}).get("completion_tokens")
    return len(answer.text_s) if counted is None else int(counted)


def _by_token(answer: Answer, gaps: Floats, tokens: int) -> Floats:
    """Each token's share of its event's gap.

    Without counts in every event, all events of an answer are taken to have brought as many.
    """
    if len(answer.written) == len(gaps) + 1:
        brought = np.maximum(np.diff(answer.written), 1)
        return np.repeat(gaps / brought, brought)
    return gaps * (len(gaps) + 1) / max(tokens, 1)


def row_of(answers: Sequence[Answer], limits: Mapping[str, float] | None = None) -> Row:
    """One row of what came; times from the first request's sending to the last answer's end.

    Keys are those of :func:`metric_names`, and ``errors``, ``token_counts``, ``models``,
    ``algorithm``; None is what nothing is known of.
    """
    whole = [answer for answer in answers if answer.error is None]
    samples = [sample_of(answer) for answer in whole]
    ends = [answer.ended_s for answer in whole]
    begin = min((answer.sent_s for answer in answers), default=0.0)
    seconds = max(max(ends, default=begin) - begin, 1e-9)
    return {
        **_throughput(whole, samples, seconds),
        "relative_error": _error_of(whole),
        **_latencies(samples),
        **_goodput(samples, seconds, limits),
        **_routing(whole),
        "completed": len(whole),
        "failed": len(answers) - len(whole),
        "failed_share": (len(answers) - len(whole)) / max(len(answers), 1),
        "errors": _errors(answers),
        "token_counts": _who_counted(whole),
        "seconds": seconds,
        **_sending(answers),
    }


def metric_names() -> list[str]:
    """The numbers that a row has, by name."""
    row = row_of([])
    texts = ("errors", "token_counts", "models", "algorithm")
    return [name for name in row if name not in texts]


def _throughput(whole: Sequence[Answer], samples: Sequence[Sample], seconds: float) -> Row:
    written = sum(each.tokens for each in samples)
    read = sum(_input_tokens(answer) for answer in whole)
    busy_s = sum(each.e2e for each in samples) / 1e3
    return {
        "requests_per_s": len(whole) / seconds,
        "tokens_per_s": written / seconds,
        "total_tokens_per_s": (written + read) / seconds,
        "per_user_tokens_per_s": written / busy_s if busy_s else None,
        "mean_concurrency": busy_s / seconds,
        "peak_concurrency": _most_at_once(whole),
        "tokens": written,
        "input_tokens": read,
        "cached_tokens": sum(_cached_tokens(answer) for answer in whole),
    }


def _most_at_once(whole: Sequence[Answer]) -> int:
    """How many answers were under way together; one that ends frees its place before another."""
    edges = [(answer.sent_s, 1) for answer in whole] + [(each.ended_s, -1) for each in whole]
    return max(itertools.accumulate(step for _, step in sorted(edges)), default=0)


def _input_tokens(answer: Answer) -> int:
    return int((answer.usage or {}).get("prompt_tokens") or answer.asked_tokens or 0)


def _cached_tokens(answer: Answer) -> int:
    details = (answer.usage or {}).get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)


def _error_of(whole: Sequence[Answer]) -> float | None:
    """The standard error of the events' rate by batch means, as a share; None if too few."""
    came = np.sort(np.concatenate([[], *(answer.text_s for answer in whole)]))
    if not len(came):
        return None
    edges = np.arange(came[0], came[-1], _BATCH_S)
    counts = np.searchsorted(came, edges)
    readings = [Counts(float(at), (int(n),)) for at, n in zip(edges, counts, strict=True)]
    found = relative_error(readings)
    return found if math.isfinite(found) else None


def _latencies(samples: Sequence[Sample]) -> Row:
    made: Row = {}
    for name in LATENCIES:
        values = pooled(samples, name)
        found = [*np.percentile(values, (50, 90, 99)), values.mean()] if len(values) else [None] * 4
        for point, value in zip((*POINTS, "mean"), found, strict=True):
            made[f"{point}_{name}_ms"] = None if value is None else float(value)
    mean_e2e = made["mean_e2e_ms"]
    made["ttft_ms"] = made["p50_ttft_ms"]
    made["latency_s"] = None if mean_e2e is None else mean_e2e / 1e3
    return made


def pooled(samples: Sequence[Sample], name: str) -> Floats:
    """All values of one latency, in milliseconds."""
    found = [getattr(each, name) for each in samples]
    return np.concatenate([[], *(np.atleast_1d(v) for v in found if v is not None)])


def _goodput(samples: Sequence[Sample], seconds: float, limits: Mapping[str, float] | None) -> Row:
    if not limits:
        return {"goodput_per_s": None, "goodput_share": None}
    good = sum(each.keeps(limits) for each in samples)
    return {"goodput_per_s": good / seconds, "goodput_share": good / max(len(samples), 1)}


def _routing(whole: Sequence[Answer]) -> Row:
    """Who wrote, from trserve's own member of the usage: the first model is the entry model."""
    own = [found for each in whole if (found := (each.usage or {}).get("trserve"))]
    by_model: Counter[str] = Counter()
    for each in own:
        by_model.update(each["tokens"])
    total, names = sum(by_model.values()), list(own[0]["tokens"]) if own else []
    handoffs = sum(each["handoffs"] for each in own)
    return {
        "algorithm": next((each.router for each in whole if each.router), None),
        "llm_share": 1 - by_model[names[0]] / total if total else None,
        "handoffs": handoffs if own else None,
        "handoffs_per_request": handoffs / len(own) if own else None,
        "models": dict(by_model) or None,
    }


def _errors(answers: Sequence[Answer]) -> dict[str, int]:
    """The most frequent ones, with how often each came."""
    said = Counter(answer.error[:_ERROR_LETTERS] for answer in answers if answer.error)
    return dict(said.most_common(_KINDS_OF_ERRORS))


def _who_counted(whole: Sequence[Answer]) -> str | None:
    if not whole:
        return None
    return "usage" if all(answer.usage for answer in whole) else "events"


def _sending(answers: Sequence[Answer]) -> Row:
    """How late requests left, how many a second did, and how many should have."""
    late = [1e3 * (answer.sent_s - answer.due_s) for answer in answers]
    p50, p99 = np.percentile(late, (50, 99)).clip(0).tolist() if late else (None, None)
    return {
        "p50_late_ms": p50,
        "p99_late_ms": p99,
        "sent_per_s": _rate([answer.sent_s for answer in answers]),
        "scheduled_per_s": _rate([answer.due_s for answer in answers]),
    }


def _rate(times_s: Sequence[float]) -> float | None:
    took_s = max(times_s, default=0.0) - min(times_s, default=0.0)
    return (len(times_s) - 1) / took_s if took_s else None
