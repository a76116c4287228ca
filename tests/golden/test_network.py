"""Two servers that only a bad network joins write what one loop over their models would have.

The network delays, jitters, stalls every hundredth packet by a retransmission time, and is gone
for a while. With ``--on-peer-loss wait`` nothing of that is seen but time. With ``degrade`` the SLM
goes on alone, marks exactly the tokens that the LLM was to write, and hands over again afterwards.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from tests.edge.network.equality import (
    Case,
    Loop,
    Unreachable,
    cases_of,
    check_waited,
    check_went_on,
)
from tests.edge.network.joined import (
    BRIEF,
    ISSUE,
    Far,
    Heard,
    Way,
    far_side,
    listen,
    until_reachable,
)
from tests.golden.random_pair import build_random_pair
from tests.golden.reference import LLM, SLM
from tests.serverproc import Server

ROOT = Path(__file__).parents[2]
ACROSS_S = 600.0


@pytest.fixture(scope="module")
def way(full: bool) -> Way:
    return ISSUE if full else BRIEF


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Loop:
    return Loop(build_random_pair(tmp_path_factory.mktemp("network"), seed=5))


@pytest.fixture(scope="module")
def far(loop: Loop, way: Way) -> Iterator[Far]:
    with far_side(loop.pair, way.weather, ("--router", "entropy")) as found:
        yield found


@pytest.fixture(scope="module")
def homes(far: Far, way: Way) -> Iterator[dict[str, Server]]:
    """One that waits and one that goes on alone; they start at the same time."""
    deadline = ("--remote-timeout-s", str(way.timeout_s))
    flags = {"wait": (), "degrade": deadline}
    with ExitStack() as stack, ThreadPoolExecutor(len(flags)) as pool:
        started = {
            kind: pool.submit(
                stack.enter_context, far.home(number, "--on-peer-loss", kind, *flags[kind])
            )
            for number, kind in enumerate(flags)
        }
        yield {kind: each.result() for kind, each in started.items()}


def test_who_waits_gets_every_token(
    homes: dict[str, Server], far: Far, loop: Loop, way: Way
) -> None:
    cases, home = cases_of(loop, "entropy", way, visits=(1, 3)), homes["wait"]
    heard = listen(home, [case.body(home.models) for case in cases], way, far.proxy)
    check_waited(loop, cases, heard)
    assert max(each.longest_gap_s for each in heard) > 0.7 * way.outage_s
    assert far.proxy.counts().stalls > 0


def test_who_goes_on_alone_marks_what_it_wrote_for_want_of_the_other(
    homes: dict[str, Server], far: Far, loop: Loop, way: Way
) -> None:
    cases, home = cases_of(loop, "entropy", way, visits=(1, 3)), homes["degrade"]
    until_reachable(home)
    heard = listen(home, [case.body(home.models) for case in cases], way, far.proxy)
    summary = check_went_on(loop, cases, heard)
    until_reachable(home)
    check_waited(loop, cases[:2], listen_once(home, cases[:2]))
    mixed = [each for each in heard if any(each.alone) and LLM in each.sources]
    assert mixed, f"no stream met the outage: {summary}"
    assert any(each.alone_in_outage for each in heard), "everybody waited"
    assert {reason for each in heard for reason in each.reasons} <= {"stop", "length"}


def listen_once(home: Server, cases: Sequence[Case]) -> list[Heard]:
    """One after the other, over a network that is only slow."""
    found = []
    for case in cases:
        found.append(Heard())
        for event in home.stream("/v1/completions", case.body(home.models)):
            found[-1].take(event)
        found[-1].over = True
    return found


def as_heard(loop: Loop, case: Case, gone: Sequence[int]) -> Heard:
    """What a stream would bring that equals the loop."""
    rule = Unreachable(case.rule(), gone)
    trace = loop.run(case, rule)
    marks = [position in rule.alone for position in range(len(trace.tokens))]
    counts = {str(model): trace.sources.count(model) for model in (SLM, LLM)}
    usage = {"completion_tokens": len(trace.tokens), "trserve": {"tokens": counts}}
    reasons = [trace.finish_reason]
    return Heard(trace.tokens, trace.sources, marks, [], reasons, usage, over=True)


@pytest.mark.parametrize("router", ["entropy", "r-stitch"])
def test_the_comparison_can_fail(loop: Loop, router: str) -> None:
    """A mark that is missing and one that is too many; the loop itself passes."""
    gone = range(8, 16)
    cases = cases_of(loop, router, replace(BRIEF, streams=3, tokens=20), visits=(1, 3))
    heard = [as_heard(loop, case, gone) for case in cases]
    check_went_on(loop, cases, heard)
    assert {at for each in heard for at, alone in enumerate(each.alone) if alone} <= set(gone)
    number = next(number for number, each in enumerate(heard) if any(each.alone))
    first = heard[number]
    marked = first.alone.index(True)
    unmarked = next(at for at, source in enumerate(first.sources) if source == SLM and at < gone[0])
    for position in (marked, unmarked):
        first.alone[position] = not first.alone[position]
        with pytest.raises(AssertionError):
            check_went_on(loop, [cases[number]], [first])
        first.alone[position] = not first.alone[position]


@pytest.mark.slow
def test_requests_that_travel_both_ways(loop: Loop, way: Way) -> None:
    """R-Stitch, whose LLM keeps the floor as long as it is unsure, and both kinds of loss."""
    cases = cases_of(loop, "r-stitch", way, visits=(1,))
    with far_side(loop.pair, way.weather, ("--router", "r-stitch")) as far:
        with far.home(0, "--on-peer-loss", "wait") as home:
            heard = listen(home, [case.body(home.models) for case in cases], way, far.proxy)
        check_waited(loop, cases, heard)
        deadline = ("--remote-timeout-s", str(way.timeout_s))
        with far.home(1, "--on-peer-loss", "degrade", *deadline) as home:
            heard = listen(home, [case.body(home.models) for case in cases], way, far.proxy)
        check_went_on(loop, cases, heard)
        assert any(any(each.alone) for each in heard)


@pytest.mark.slow
def test_the_same_across_two_network_namespaces() -> None:
    for tool in ("unshare", "nsenter", "ip"):
        if shutil.which(tool) is None:
            pytest.skip(f"no {tool} here to make network namespaces with")
    inside = ["unshare", "--user", "--map-root-user", "--net"]
    may = subprocess.run([*inside, "true"], capture_output=True, text=True)
    if may.returncode:
        pytest.skip(f"network namespaces may not be made here: {may.stderr.strip()}")
    command = [*inside, sys.executable, "-m", "tests.edge.network.across"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=ACROSS_S, cwd=ROOT)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
