"""A running server beside the reference of its models, and the settings that both are asked.

The settings cover each way of decoding: three thresholds, one model alone, the LLM first,
sampling at two temperatures, penalties and biases under greedy decoding, and everything at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.golden.compare import Summary, assert_golden
from tests.golden.completions import Reply, ask, check_accounts
from tests.golden.reference import LLM, SLM, Reference, Setting, Trace
from tests.serverproc import Server, concurrently, wait_until

LARGE_SEED = 0x1234_5678_9ABC_DEF0
SETTINGS = (
    *("low", "middle", "high", "slm-only", "llm-only", "llm-first"),
    *("sampled", "warm", "penalised", "shaped"),
)

Case = tuple[int, str]
"""Index of the prompt and name of the setting."""


def loads(server: Server) -> list[dict[str, Any]]:
    """What the workers of a server that has just fallen idle say, once they have said it.

    They do so ten milliseconds later, or in their next step.
    """

    def probe() -> list[dict[str, Any]]:
        return server.request("GET", "/health").json()["models"]

    def settled(models: list[dict[str, Any]]) -> bool:
        return all(m["free_blocks"] + m["cached_blocks"] == m["total_blocks"] for m in models)

    return wait_until(probe, settled, 2.0)


@dataclass
class Pair:
    """One running server, the reference of its models, and what is asked of both."""

    name: str
    server: Server
    reference: Reference
    prompts: Sequence[Sequence[int]]
    settings: dict[str, Setting]

    def expected(self, case: Case) -> Trace:
        index, _ = case
        return self.reference.run(self.prompts[index], self.setting(case))

    def setting(self, case: Case) -> Setting:
        """Every request has a seed of its own, most of them with bits above the 32nd."""
        index, name = case
        return dataclasses.replace(self.settings[name], seed=LARGE_SEED >> index % 5 * 8)

    def check(self, cases: Sequence[Case], concurrency: int, streamed: Sequence[bool]) -> Summary:
        """Asks everything, compares everything."""
        traces = [self.expected(case) for case in cases]

        def one(at: int) -> Reply:
            index, _ = cases[at]
            stream = streamed[at % len(streamed)]
            return ask(self.server, self.prompts[index], self.setting(cases[at]), stream)

        replies = concurrently(one, range(len(cases)), concurrency)
        labels = [f"{self.name}, prompt {index}, {name}" for index, name in cases]
        answers = [reply.answer for reply in replies]
        summary = assert_golden(zip(labels, traces, answers, strict=True))
        for reply, trace in zip(replies, traces, strict=True):
            check_accounts(reply, trace, self.server.models)
        return summary


def settings_of(taus: Sequence[float], max_tokens: int) -> dict[str, Setting]:
    low, middle, high = taus
    routed = Setting(tau=middle, max_tokens=max_tokens)
    changes: dict[str, dict[str, Any]] = {
        "low": {"tau": low},
        "middle": {},
        "high": {"tau": high},
        "slm-only": {"tau": 0.0, "only": SLM},
        "llm-only": {"tau": 0.0, "only": LLM},
        "llm-first": {"entry": LLM},
        "sampled": {"temperature": 1.0},
        "warm": {"tau": high, "temperature": 0.6},
        "penalised": {
            "repetition_penalty": 1.3,
            "presence_penalty": -0.4,
            "frequency_penalty": 0.3,
            "logit_bias": ((65, 2.0), (66, -100.0)),
        },
        "shaped": {
            "temperature": 0.9,
            "top_k": 30,
            "top_p": 0.9,
            "min_p": 0.02,
            "repetition_penalty": 1.2,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.2,
            "logit_bias": ((65, 1.5), (32, -3.0), (97, 0.25)),
        },
    }
    return {name: dataclasses.replace(routed, **changes[name]) for name in SETTINGS}
