"""What streams across a bad network must equal: one plain loop over the models.

Who waits for the network gets every token of the undisturbed loop. Who goes on alone gets those of
a loop that is told at which positions the LLM could not be reached: where it was to write one of
them, the SLM's own token stands, marked, and nowhere else. Knows no servers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from random import Random
from typing import Any

import torch

from tests.edge.network.joined import Heard, Way
from tests.golden.compare import Answer, Summary, assert_golden, compare
from tests.golden.completions import body_of
from tests.golden.pairs import LARGE_SEED
from tests.golden.random_pair import OUTPUT, RandomPair, random_prompts
from tests.golden.reference import LLM, SLM, Setting, Trace
from tests.golden.routed import RoutedReference
from tests.golden.rules import BothWays, Decision, OneWay, Rule, View, entropy


@dataclass(frozen=True)
class Case:
    """One request: ``own`` is what it says of the router, ``rule`` what follows from that."""

    prompt: Sequence[int]
    setting: Setting
    own: dict[str, float]
    rule: Callable[[], Rule]
    endless: bool

    def body(self, models: Sequence[str]) -> dict[str, Any]:
        """The request; an endless one has its full length whatever it says."""
        body = body_of(self.prompt, self.setting, models)
        body["trserve"]["router"] = self.own
        usage = {"include_usage": True}
        return body | {"ignore_eos": self.endless, "stream_options": usage}


class Unreachable(Rule):
    """``inner``, but the LLM cannot write the output positions ``where``.

    Attributes:
        alone: those at which it was to.
    """

    def __init__(self, inner: Rule, where: Collection[int]) -> None:
        self.inner = inner
        self.where = frozenset(where)
        self.alone: set[int] = set()
        self._taken_back = False

    def decide(self, view: View) -> Decision:
        decision = self.inner.decide(view)
        position = len(view.row) - view.prompt_len
        if view.model == SLM:
            if self._taken_back or (decision.next == LLM and position in self.where):
                self._taken_back = False
                self.alone.add(position)
                return replace(decision, next=SLM, kept=True)
        elif decision.next == LLM and position + 1 in self.where:
            self._taken_back = True
            return replace(decision, next=SLM)
        return decision


class Loop:
    """The reference of a pair, for texts that end where they say and for those that do not."""

    def __init__(self, pair: RandomPair) -> None:
        self.pair = pair
        self.reference = RoutedReference(pair.slm, pair.llm)

    @cached_property
    def median(self) -> float:
        """The entropy that half of the SLM's tokens exceed; float32, as a request's are held."""
        signals = self.reference.signals(random_prompts(4, Random("signals")), OUTPUT, entropy)
        return float(torch.quantile(signals, torch.tensor(0.5, dtype=torch.float64)).float())

    def run(self, case: Case, rule: Rule) -> Trace:
        reference = self.reference
        if case.endless:
            reference = copy.copy(reference)
            reference.eos = frozenset()
        return reference.run(case.prompt, case.setting, rule)


def cases_of(loop: Loop, router: str, way: Way, visits: Sequence[int]) -> list[Case]:
    """As many as ``way`` has streams: greedy and sampled, endless and not, in turns.

    About half of the tokens are the LLM's.
    """
    prompts = random_prompts(way.streams, Random(f"network {router}"))
    found = []
    for index, prompt in enumerate(prompts):
        heat = 0.8 if index % 2 else 0.0
        seed = LARGE_SEED >> index % 5 * 8
        setting = Setting(max_tokens=way.tokens, temperature=heat, seed=seed)
        own, rule = _routing(loop, router, visits[index // 2 % len(visits)])
        found.append(Case(prompt, setting, own, rule, endless=index % 4 < 3))
    return found


def _routing(loop: Loop, router: str, visit: int) -> tuple[dict[str, float], Callable[[], Rule]]:
    if router == "r-stitch":
        tau = loop.pair.taus[1]
        return {"tau": tau}, lambda: BothWays(tau, 0.0)
    threshold = loop.median
    own = {"threshold": threshold, "visit_tokens": float(visit)}
    return own, lambda: OneWay(entropy, threshold, above=True, visit=visit)


def _labelled(
    cases: Sequence[Case], traces: Sequence[Trace], heard: Sequence[Heard]
) -> list[tuple[str, Trace, Answer]]:
    return [
        (f"stream {number}", trace, Answer(each.tokens, each.sources, each.reasons[0]))
        for number, (trace, each) in enumerate(zip(traces, heard, strict=True))
    ]


def check_waited(loop: Loop, cases: Sequence[Case], heard: Sequence[Heard]) -> Summary:
    """Every token is the loop's, and nobody wrote one alone."""
    for each in heard:
        each.check()
        assert not any(each.alone)
        assert each.usage["trserve"]["degraded"] is False
    traces = [loop.run(case, case.rule()) for case in cases]
    return assert_golden(_labelled(cases, traces, heard))


def check_went_on(loop: Loop, cases: Sequence[Case], heard: Sequence[Heard]) -> Summary:
    """Every token is that of the loop that is told what carries the mark; it needed all of that."""
    traces = []
    for number, (case, each) in enumerate(zip(cases, heard, strict=True)):
        each.check()
        marked = {position for position, alone in enumerate(each.alone) if alone}
        assert all(each.sources[position] == SLM for position in marked)
        rule = Unreachable(case.rule(), marked)
        trace = loop.run(case, rule)
        traces.append(trace)
        answer = Answer(each.tokens, each.sources, each.reasons[0])
        if compare(trace, answer).stop is None:
            assert rule.alone == marked, f"stream {number}: {sorted(marked ^ rule.alone)}"
    return assert_golden(_labelled(cases, traces, heard))
