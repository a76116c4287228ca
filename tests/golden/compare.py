"""What *equal to the reference* means, and the report when an answer is not.

Token for token and source for source, up to the first position at which the answer differs and
the reference was within rounding of a different choice (a *tie*): two logits almost equal, u
almost on a boundary, the entropy almost at the threshold. A float32 product on a CPU depends on
the shape of the batch, so such a position may honestly go either way; what follows it is another
text, and the comparison *stops* there. A tie at which both agree hides nothing, so the comparison
goes on through it. Stops are counted and bounded, so that ties cannot become an excuse.

Knows traces and answers; not how either came about.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tests.golden.reference import LLM, SLM, Step, Trace

GREEDY_GAP = 1e-4
CDF_DISTANCE = 1e-5
ROUTER_DISTANCE = 1e-5
MAX_STOPPED_SHARE = 0.01
MIN_COMPARED_SHARE = 0.97
_CONTEXT = 6


@dataclass(frozen=True)
class Answer:
    """What a server said to one request."""

    tokens: Sequence[int]
    sources: Sequence[int]
    finish_reason: str


@dataclass(frozen=True)
class Comparison:
    """``stop`` is the tie at which the comparison ended; ``mismatch`` is a report, or None."""

    total: int
    compared: int
    ties: int
    stop: int | None = None
    mismatch: str | None = None


@dataclass(frozen=True)
class Summary:
    """Counts over many requests."""

    requests: int
    stops: int
    ties: int
    tokens: int
    compared: int

    def __str__(self) -> str:
        return (
            f"{self.requests} requests, {self.compared} of {self.tokens} tokens compared, "
            f"{self.stops} stopped at a tie, {self.ties} ties in the reference"
        )


def ties(trace: Trace) -> set[int]:
    """The output positions at which the reference was within rounding of a different choice.

    The entropy of a step of the SLM decides who writes that position; that of a step of the LLM
    decides who begins the next one, if there is one.
    """
    limit = GREEDY_GAP if trace.setting.greedy else CDF_DISTANCE
    found = set()
    for step in trace.steps:
        if step.kept and step.choice_margin < limit:
            found.add(step.position)
        if step.router_margin < ROUTER_DISTANCE:
            found.add(step.position + (step.model == LLM))
    return {position for position in found if position < len(trace.tokens)}


def compare(trace: Trace, answer: Answer) -> Comparison:
    """Compares one answer with its reference."""
    total, tied = len(trace.tokens), ties(trace)
    expected = list(zip(trace.tokens, trace.sources, strict=True))
    if len(answer.tokens) != len(answer.sources):
        lengths = f"{len(answer.tokens)} tokens but {len(answer.sources)} sources"
        return Comparison(total, 0, len(tied), mismatch=f"the answer has {lengths}")
    got = list(zip(answer.tokens, answer.sources, strict=True))
    position = _first_difference(expected, got)
    if position is None:
        mismatch = None
        if answer.finish_reason != trace.finish_reason:
            mismatch = f"finish reason {answer.finish_reason!r}, expected {trace.finish_reason!r}"
        return Comparison(total, total, len(tied), mismatch=mismatch)
    if position in tied:
        return Comparison(total, position, len(tied), stop=position)
    report = _report(trace, answer, position)
    return Comparison(total, min(position, total), len(tied), mismatch=report)


def assert_golden(cases: Iterable[tuple[str, Trace, Answer]]) -> Summary:
    """Fails unless every answer equals its reference within the bounds on stops; prints counts.

    Each case is (label, reference, answer); the label finds the request in a report.
    """
    results = [(label, compare(trace, answer)) for label, trace, answer in cases]
    wrong = [f"{label}: {result.mismatch}" for label, result in results if result.mismatch]
    summary = Summary(
        requests=len(results),
        stops=sum(result.stop is not None for _, result in results),
        ties=sum(result.ties for _, result in results),
        tokens=sum(result.total for _, result in results),
        compared=sum(result.compared for _, result in results),
    )
    print(summary)
    more = f"\n... and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    shown = "\n\n".join(wrong[:3]) + more
    assert not wrong, f"{len(wrong)} of {len(results)} answers differ ({summary})\n\n{shown}"
    assert results, "nothing was compared"
    allowed = max(1, int(MAX_STOPPED_SHARE * summary.requests))
    assert summary.stops <= allowed, f"more than {allowed} stops: {summary}"
    assert summary.compared >= MIN_COMPARED_SHARE * summary.tokens, f"too few compared: {summary}"
    return summary


def _first_difference(
    expected: Sequence[tuple[int, int]], got: Sequence[tuple[int, int]]
) -> int | None:
    pairs = zip(expected, got, strict=False)
    unequal = (index for index, (ours, theirs) in enumerate(pairs) if ours != theirs)
    shorter = min(len(expected), len(got))
    return next(unequal, None if len(expected) == len(got) else shorter)


def _report(trace: Trace, answer: Answer, position: int) -> str:
    """The position, what each side has there, and how safe the reference was."""
    setting = trace.setting
    lines = [
        f"first difference at output position {position} "
        f"(prompt of {len(trace.prompt)} tokens, {setting})",
        f"  expected {_item(trace.tokens, trace.sources, position)} "
        f"({len(trace.tokens)} tokens, {trace.finish_reason})",
        f"  got      {_item(answer.tokens, answer.sources, position)} "
        f"({len(answer.tokens)} tokens, {answer.finish_reason})",
        f"  before   {_window(trace, max(0, position - _CONTEXT), position)}",
        f"  expected {_window(trace, position, position + _CONTEXT)} ...",
        f"  got      {_pairs(answer.tokens, answer.sources, position, position + _CONTEXT)} ...",
    ]
    near = [step for step in trace.steps if position - 1 <= step.position <= position]
    return "\n".join(lines + [f"  {_step(step)}" for step in near])


def _item(tokens: Sequence[int], sources: Sequence[int], position: int) -> str:
    if position >= len(tokens):
        return "nothing, it has ended"
    return f"token {tokens[position]} from model {sources[position]}"


def _window(trace: Trace, start: int, stop: int) -> str:
    return _pairs(trace.tokens, trace.sources, start, stop)


def _pairs(tokens: Sequence[int], sources: Sequence[int], start: int, stop: int) -> str:
    """``token/model`` of each position."""
    window = zip(tokens[start:stop], sources[start:stop], strict=True)
    return " ".join(f"{token}/{source}" for token, source in window)


def _step(step: Step) -> str:
    name = "SLM" if step.model == SLM else "LLM"
    fate = "kept" if step.kept else "discarded"
    return (
        f"step at {step.position}: {name} drew {step.token}, {fate}; H={step.entropy:.6f}, "
        f"choice margin {step.choice_margin:.2e}, router margin {step.router_margin:.2e}"
    )
