"""The comparison across a bad network can fail: it is shown answers made by the loop itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.edge.network.equality import Case, Loop, Unreachable, cases_of, check_went_on, loop_of
from tests.edge.network.joined import BRIEF, Heard
from tests.golden.random_pair import build_random_pair
from tests.golden.reference import LLM, SLM

WAY = replace(BRIEF, streams=4, tokens=24)
GONE = range(8, 16)


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Loop:
    return loop_of(build_random_pair(tmp_path_factory.mktemp("loop"), seed=5))


def as_heard(loop: Loop, case: Case, gone: Sequence[int]) -> Heard:
    rule = Unreachable(case.rule(), gone)
    trace = loop.run(case, rule)
    marks = [position in rule.alone for position in range(len(trace.tokens))]
    counts = {str(model): trace.sources.count(model) for model in (SLM, LLM)}
    usage = {"completion_tokens": len(trace.tokens), "trserve": {"tokens": counts}}
    reasons = [trace.finish_reason]
    return Heard(trace.tokens, trace.sources, marks, [], reasons, usage, over=True)


@pytest.mark.parametrize("router", ["entropy", "r-stitch"])
def test_the_loop_equals_itself_and_nothing_else(loop: Loop, router: str) -> None:
    cases = cases_of(loop, router, WAY, visits=(1, 3))
    heard = [as_heard(loop, case, GONE) for case in cases]
    marked = [position for each in heard for position, alone in enumerate(each.alone) if alone]
    assert set(marked) <= set(GONE)
    assert len(marked) >= len(cases)
    check_went_on(loop, cases, heard)
    first = next(each for each in heard if any(each.alone))
    position = first.alone.index(True)
    first.alone[position] = False
    with pytest.raises(AssertionError):
        check_went_on(loop, cases, heard)
    first.alone[position] = True
    unmarked = next(at for at, source in enumerate(first.sources) if source == SLM and at < GONE[0])
    first.alone[unmarked] = True
    with pytest.raises(AssertionError):
        check_went_on(loop, cases, heard)
