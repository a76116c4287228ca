"""The reference for any rule and any number of models: one plain loop, one request at a time.

As ``reference``, whose parts it is made of, but who writes next is a rule's decision and no longer
R-Stitch's. Knows nothing of trserve.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.golden.philox import uniform
from tests.golden.reference import (
    Model,
    Session,
    Setting,
    Step,
    Trace,
    arg_max,
    filtered,
    inverse_cdf,
    masked,
    penalised,
)
from tests.golden.rules import Rule, View


class RoutedSession(Session):
    """A session that also gives the last hidden state, and what the last layer's MLP read."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.tap = torch.empty(0)
        norm = model.net.model.layers[-1].post_attention_layernorm
        norm.register_forward_hook(self._keep)

    def _keep(self, module: Any, inputs: Any, output: torch.Tensor) -> None:
        self.tap = output[0, -1]

    @torch.inference_mode()
    def read(self, row: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Raw logits [V] in float64, and the hidden state [H] after the final norm."""
        unseen = torch.tensor([row[self.seen :]])
        arguments: dict[str, Any] = {self.keyword: self.cache, "use_cache": True}
        output = self.model.net(
            input_ids=unseen, logits_to_keep=1, output_hidden_states=True, **arguments
        )
        self.seen = len(row)
        return masked(output.logits[0, -1], self.model.size), output.hidden_states[-1][0, -1]


class RoutedReference:
    """``models`` in the order of ``--models``."""

    def __init__(self, *paths: Path) -> None:
        self.models = tuple(Model(path) for path in paths)
        self.eos = frozenset().union(*(model.eos for model in self.models))

    def run(
        self, prompt: Sequence[int], setting: Setting, rule: Rule, *, named: bool = False
    ) -> Trace:
        """The trace of ``prompt``; ``named``: the request says that ``setting.entry`` begins."""
        trace, row = Trace(tuple(prompt), setting), list(prompt)
        sessions = [RoutedSession(model) for model in self.models]
        writer = setting.entry
        if not named:
            writer = rule.first(setting.seed, len(prompt), len(self.models))
            trace.handoffs = int(writer != 0)
        while True:
            logits, hidden = sessions[writer].read(row)
            token, choice = _choose(logits, row, writer, trace)
            decision = rule.decide(
                View(
                    model=writer,
                    models=len(self.models),
                    row=tuple(row),
                    token=token,
                    logits=logits,
                    hidden=hidden,
                    tap=sessions[writer].tap,
                    size=self.models[writer].size,
                    seed=setting.seed,
                    prompt_len=len(prompt),
                )
            )
            at = len(trace.tokens)
            trace.steps.append(
                Step(at, writer, token, decision.kept, decision.score, choice, decision.margin)
            )
            if decision.kept:
                row.append(token)
                trace.tokens.append(token)
                trace.sources.append(writer)
                trace.finish_reason = self._finish(token, trace)
                if trace.finish_reason:
                    return trace
            trace.handoffs += int(decision.next != writer)
            writer = decision.next

    def signals(
        self, prompts: Sequence[Sequence[int]], tokens: int, signal: Callable[[View], float]
    ) -> torch.Tensor:
        """``signal`` along what model 0 writes alone, greedily."""
        found: list[float] = []

        class Listening(Rule):
            def decide(self, view: View) -> Any:
                found.append(signal(view))
                return Alone

        class Alone:
            next, kept, score, margin = 0, True, 0.0, 0.0

        for prompt in prompts:
            self.run(prompt, Setting(max_tokens=tokens), Listening())
        return torch.tensor(found, dtype=torch.float64)

    def _finish(self, token: int, trace: Trace) -> str:
        if token in self.eos:
            return "stop"
        return "length" if len(trace.tokens) == trace.setting.max_tokens else ""


def _choose(
    logits: torch.Tensor, row: Sequence[int], writer: int, trace: Trace
) -> tuple[int, float]:
    """The token of a step and the margin of its choice."""
    setting = trace.setting
    wanted = penalised(logits, row, len(trace.prompt), setting)
    if setting.greedy:
        return arg_max(wanted)
    u = uniform(setting.seed, len(row), writer)
    kept, filter_margin = filtered(wanted / setting.temperature, setting)
    token, margin = inverse_cdf(kept, 1.0, u)
    return token, min(margin, filter_margin)
