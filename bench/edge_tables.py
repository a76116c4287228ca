"""The rows of the edge study, the paper's own beside them, and what is judged. Knows no servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from bench.common import Row
from bench.edge_measured import Means

PAPER: Final = "paper-method"
TRSERVE: Final = "trserve"
PUBLISHED: Final[Mapping[float, tuple[int, float, float]]] = {
    0.6: (1, 28.4, 0.28),
    0.7: (14, 40.1, 0.33),
    0.8: (65, 86.3, 0.80),
    0.9: (76, 101.1, 1.18),
}
"""Threshold: routed tokens, total s, time between tokens s (arXiv 2504.07878)."""

ASSUMED_LLM: Final = 32_500_000_000
"""Parameters that the cost takes an emulated LLM to have: the paper's Qwen2.5-32B."""

LEAST_FASTER: Final = 5.0
MOST_BYTES: Final = 200.0
JUDGED: Final = ((0.7, 1), (0.8, 4))
"""(threshold, visit_tokens) at which trserve is to be five times faster, without service time."""

BASELINE: Final = "float32"
"""What ONNX Runtime, on which the paper's method runs, computes in on a CPU: it is judged so."""

OTHER: Final = "bfloat16"
"""What this machine may do better. Shown beside it where it was measured."""


_COLUMNS: Final = {
    "method": "method",
    "dtype": "slm_dtype",
    "service": "service_s",
    "threshold": "threshold",
    "visit": "visit_tokens",
    "ttft_ms": "ttft_ms",
    "tbt_ms": "tbt_ms",
    "routed": "routed_tokens",
    "total_s": "total_s",
    "faster": "times_faster",
    "B/handoff": "bytes_per_handoff",
    "cost": "cost",
    "compute": "compute_s",
    "network": "network_s",
    "LLM": "service_total_s",
    "paper's s": "published_total_s",
}
"""The first table's; compute, network and LLM are the parts of total_s."""


@dataclass(frozen=True)
class Setting:
    """One row to measure: ``dtype`` of the SLM; ``visit`` tokens of the LLM at a time."""

    method: str
    dtype: str
    service_s: float
    threshold: float
    visit: int = 1


def cost(means: Means, slm: int, llm: int) -> float:
    """Active parameters x tokens drawn, the LLM alone being 1; reading does not count."""
    return (slm * means.drawn + llm * means.routed) / (llm * means.tokens)


def row(setting: Setting, means: Means, parameters: tuple[int, int]) -> Row:
    """One row; ``accuracy`` is None, as the tokens are made up."""
    return {
        "method": setting.method,
        "slm_dtype": setting.dtype,
        "service_s": setting.service_s,
        "threshold": setting.threshold,
        "visit_tokens": setting.visit,
        "ttft_ms": means.ttft_ms,
        "tbt_ms": means.tbt_ms,
        "routed_tokens": means.routed,
        "visits": means.visits,
        "total_s": means.total_s,
        "accuracy": None,
        "bytes_per_handoff": means.bytes_per_handoff,
        "frame_bytes_per_handoff": means.frame_bytes_per_handoff,
        "cost": cost(means, *parameters),
        "compute_s": means.compute_s,
        "network_s": means.network_s,
        "service_total_s": means.service_s,
    }


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """``rows``, those of trserve with how many times as long the paper's method takes."""
    found = []
    for each in rows:
        published = PUBLISHED.get(each["threshold"], (None, None, None))
        names = ("published_routed", "published_total_s", "published_tbt_s")
        ratios = {
            "times_faster": _ratio(each, rows, BASELINE),
            f"times_faster_{OTHER}": _ratio(each, rows, OTHER),
        }
        found.append({**each, **ratios, **dict(zip(names, published, strict=True))})
    return found


def _ratio(ours: Row, rows: Sequence[Row], dtype: str) -> float | None:
    """By how much the paper's method in ``dtype`` takes longer; None where it was not measured."""
    wanted = (PAPER, dtype, ours["service_s"], ours["threshold"])
    keys = ("method", "slm_dtype", "service_s", "threshold")
    beside = [each["total_s"] for each in rows if tuple(each[key] for key in keys) == wanted]
    return beside[0] / ours["total_s"] if beside and ours["method"] == TRSERVE else None


def shown(row: Row) -> Row:
    """What the first table has of a row: nothing of one of the second."""
    if "service_s" not in row:
        return {}
    return {column: row[key] for column, key in _COLUMNS.items()}


def verdicts(rows: Sequence[Row]) -> list[Row]:
    """What is judged, as far as it was measured; ``ok`` is whether it holds."""
    found: list[Row] = []
    for threshold, visit in JUDGED:
        for each in rows:
            judged = (each["service_s"], each["threshold"], each["visit_tokens"])
            if judged == (0.0, threshold, visit) and each.get("times_faster") is not None:
                found.append(
                    {
                        "what": f"times faster at {threshold:g}, visit_tokens={visit}, no service",
                        "found": each["times_faster"],
                        "wanted": f"{LEAST_FASTER:g} or more",
                        "ok": each["times_faster"] >= LEAST_FASTER,
                    }
                )
                if (other := each[f"times_faster_{OTHER}"]) is not None:
                    what = f"the same, its SLM in {OTHER}"
                    found.append({"what": what, "found": other, "wanted": "–", "ok": None})
    if (payload := _most(rows, "frame_bytes_per_handoff")) is not None:
        found.append(
            {
                "what": "payload bytes per handoff, the worst row's mean",
                "found": payload,
                "wanted": f"{MOST_BYTES:g} or less",
                "ok": payload <= MOST_BYTES,
            }
        )
    if (wire := _most(rows, "bytes_per_handoff")) is not None:
        what = "the same with TCP's payload: encryption, and heartbeats while the LLM works"
        found.append({"what": what, "found": wire, "wanted": "–", "ok": None})
    return found


def _most(rows: Sequence[Row], name: str) -> float | None:
    """The largest of our own rows' values; None where none has one."""
    own = (row[name] for row in rows if row["method"] == TRSERVE)
    return max((value for value in own if value is not None), default=None)


def plot(axes: Any, rows: Sequence[Row]) -> None:
    """Seconds for an answer over the threshold."""

    def kind(row: Row) -> tuple[str, str, float, int]:
        return row["method"], row["slm_dtype"], row["service_s"], row["visit_tokens"]

    rows = [each for each in rows if each["total_s"] is not None]
    for each_kind in dict.fromkeys(map(kind, rows)):
        own = [each for each in rows if kind(each) == each_kind]
        points = sorted((each["threshold"], each["total_s"]) for each in own)
        method, dtype, service, visit = each_kind
        label = f"{method}, {dtype}, {service:g} s a token, {visit} a visit"
        axes.plot(*zip(*points, strict=True), "o-", label=label)
    published = [(threshold, total) for threshold, (_, total, _) in PUBLISHED.items()]
    axes.plot(*zip(*published, strict=True), "kx", label="published")
    axes.set(xlabel="threshold", ylabel="seconds for an answer of 100 tokens", yscale="log")
    axes.legend()
