"""What the pareto benchmark concludes, on rows made by hand; and its query-level router."""

from __future__ import annotations

import pytest
import torch

from bench.pareto import QUERY_SHARES, Answer, Outcome, Setting, by_query
from bench.pareto_verdict import QUERY_LEVEL, accuracy_at, verdict
from bench.query_level import QueryRouter


def row(router: str, share: float, accuracy: float) -> dict[str, object]:
    return {"router": router, "llm_share": share, "accuracy": accuracy}


ROWS = [
    row("slm-alone", 0.0, 0.4),
    row("llm-alone", 1.0, 1.0),
    row("good", 0.02, 0.8),
    row("good", 0.06, 0.96),
    row("poor", 0.5, 0.9),
    *(row(QUERY_LEVEL, share, 0.4 + 0.6 * share) for share in (0.02, 0.5, 0.8)),
]


def test_accuracy_is_interpolated_within_what_was_measured() -> None:
    good = [r for r in ROWS if r["router"] == "good"]
    assert accuracy_at(0.04, good) == pytest.approx(0.88)
    assert accuracy_at(0.01, good) is None
    assert accuracy_at(0.07, good) is None


def test_the_best_router_is_set_beside_the_query_level_one() -> None:
    found = {r["llm_share"]: r for r in verdict(ROWS, problems=400)}
    assert list(found) == [0.04, 0.05, 0.1, 0.2, 0.3, 0.5]
    assert found[0.04]["best"] == "good"
    assert found[0.04]["gap_recovered"] == pytest.approx(0.8)
    # At half of the tokens only one was measured: 0.9 beside 0.7, with errors of 0.015 and 0.023.
    assert found[0.5]["best"] == "poor"
    assert found[0.5]["lead"] == pytest.approx(0.2 / (0.015**2 + 0.0229**2) ** 0.5, rel=0.01)


def test_the_query_router_orders_prompts_by_what_makes_them_hard() -> None:
    generator = torch.Generator().manual_seed(0)
    features = 7 + 2 * torch.randn(600, 5, generator=generator)
    wrong = features[:, 1] + 0.3 * torch.randn(600, generator=generator) > 7.5
    router = QueryRouter(features[:400], wrong[:400])
    scores, later = router.scores(features[400:]), wrong[400:]
    assert float(((scores > 0.5) == later).float().mean()) > 0.9
    assert float(scores[later].mean()) > 0.5 > float(scores[~later].mean())


def test_the_query_router_gives_whole_problems_to_the_llm() -> None:
    slm = [Answer(right=i < 2, tokens=10, llm_tokens=0, drawn=(10, 0)) for i in range(5)]
    llm = [Answer(right=True, tokens=20, llm_tokens=20, drawn=(0, 20)) for _ in range(5)]
    alone = [Outcome(Setting(name, {}), answers, 1.0) for name, answers in (("s", slm), ("l", llm))]
    found = by_query(*alone, likely_wrong=[0.1, 0.2, 0.9, 0.3, 0.8])
    at_two_fifths = found[QUERY_SHARES.index(0.4)]
    assert [answer.llm_tokens > 0 for answer in at_two_fifths.answers] == [0, 0, 1, 0, 1]
    assert at_two_fifths.accuracy == pytest.approx(0.8)
    assert at_two_fifths.llm_share == pytest.approx(40 / 70)
    assert at_two_fifths.parameter_tokens((1, 6)) == 30 + 6 * 40
