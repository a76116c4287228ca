"""Published figures, ratios and plots beside the rows of ``throughput``. Measures nothing.

The figures are TokenRouter's (arXiv 2610.12242), on 8 A100-80G: compare ratios, not absolute
numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from bench import two_hosts
from bench.common import Row, print_table

_ALONE: Final = ("slm-only", "llm-only")

_COLUMNS: Final = ("LLM-only N=1", "official N=1", "N=1", "LLM-only N=4", "official N=4", "N=4")
_PUBLISHED: Final[dict[str, tuple[str, tuple[float | None, ...]]]] = {
    "r2r": ("1.5B/32B, AIME", (40.17, 54.77, 105.81, 145.30, 89.62, 244.56)),
    "citer": ("1.5B/72B, CommonsenseQA", (34.40, 14.26, 50.63, 123.72, 17.16, 149.31)),
    "co-llm": ("7B/70B, GSM8K", (36.06, 2.80, 28.57, 134.79, 3.46, 76.02)),
    "r-stitch": ("1.5B/32B, AIME", (40.82, None, 55.78, 150.41, None, 140.58)),
}
"""Tokens/s by algorithm: its models and workload, then a value for each of _COLUMNS."""

PUBLISHED_CURVE: Final[dict[tuple[int, tuple[int, ...]], tuple[float, float]]] = {
    (2, (1, 1)): (99.0, 94.4),
    (2, (1, 2)): (110.3, 122.3),
    (3, (1, 1)): (142.3, 125.9),
    (3, (1, 2)): (158.1, 169.0),
    (3, (1, 3)): (151.9, 158.3),
    (4, (1, 1)): (187.2, 161.2),
    (4, (1, 2)): (195.4, 179.1),
    (4, (1, 3)): (207.9, 197.4),
    (4, (1, 4)): (190.7, 193.7),
}
"""R2R, p = 0.35: (predicted, measured) tokens/s by (N, B)."""


_SHORT: Final = {
    "workload": "workload",
    "jump": "jump",
    "follows_s": "follows s",
    "system": "system",
    "concurrency": "N",
    "batch_threshold": "B",
    "tokens_per_s": "tok/s",
    "predicted_tokens_per_s": "pred.",
    "steps_alone_tokens_per_s": "alone",
    "steps_measured_tokens_per_s": "as stepped",
    "ratio": "ratio",
    "published_ratio": "publ.",
    "per_user_tokens_per_s": "/user",
    "ttft_ms": "ttft ms",
    "latency_s": "lat. s",
    "p": "p",
    "llm_share": "LLM",
    "relative_error": "error",
    "tokens": "tokens",
    "seconds": "s",
    "gate_timeout_share": "late",
}
"""Columns of the printed table; the JSON has all."""


def short(row: Row) -> Row:
    """A row as the printed table has it; nothing of one that is of no system."""
    if "system" not in row:
        return {}
    if "not_available" in row:
        return {"workload": row["workload"], "system": row["system"], "tok/s": "not available"}
    return {name: row[key] for key, name in _SHORT.items() if key in row}


def print_missing(rows: Sequence[Row]) -> None:
    """Why systems are not available, a line each."""
    for row in rows:
        if "not_available" in row:
            print(f"{row['system']}: not available: {row['not_available']}")


def print_published(algorithms: Sequence[str]) -> None:
    """The published tokens/s of ``algorithms``; nothing for those without."""
    rows: list[Row] = []
    for name in algorithms:
        if name not in _PUBLISHED:
            continue
        what, values = _PUBLISHED[name]
        figures = dict(zip(_COLUMNS, values, strict=True))
        official = values[4]
        gain = values[5] / official if official and values[5] else None
        rows.append({"algorithm": name, "of": what, **figures, "x official N=4": gain})
    if rows:
        print_table("published tokens/s (8 A100-80G; N=1, N=4: TokenRouter)", rows)


def print_ratios(rows: Sequence[Row]) -> None:
    """Every system's tokens/s over standard serving's in the same cell."""
    found = ratios(rows)
    if found:
        print_table("tokens/s over standard serving's", found)


def ratios(rows: Sequence[Row]) -> list[Row]:
    """One row for each workload and number of users at which standard serving was measured."""
    measured = [row for row in rows if "tokens_per_s" in row]
    routed = sorted({row["algorithm"] for row in measured if row["algorithm"]})
    made: list[Row] = []
    for row in measured:
        if row["system"] != "std-serving":
            continue
        beside: Row = {key: row[key] for key in ("algorithm", "workload", "concurrency")}
        beside["std_tokens_per_s"] = row["tokens_per_s"]
        for other in measured:
            same_place = all(other[key] == row[key] for key in ("workload", "concurrency"))
            # Models alone have no algorithm: they stand beside each.
            if same_place and other is not row and other["algorithm"] in (None, row["algorithm"]):
                beside[other["system"]] = other["tokens_per_s"] / row["tokens_per_s"]
        made.append(beside)
    assert len({(r["algorithm"], r["workload"], r["concurrency"]) for r in made}) == len(made), (
        f"a cell was measured twice: {routed}"
    )
    return made


def plot(axes: Any, rows: Sequence[Row]) -> None:
    """Throughput against per-user speed, a line a system."""
    measured = [row for row in rows if row.get("tokens_per_s") and row.get("concurrency")]
    for system in dict.fromkeys(row["system"] for row in measured):
        mine = sorted(
            (row["per_user_tokens_per_s"], row["tokens_per_s"])
            for row in measured
            if row["system"] == system
        )
        axes.plot([x for x, _ in mine], [y for _, y in mine], "o-", label=system)
    axes.set(xlabel="tokens/s per user", ylabel="tokens/s")
    axes.legend()


def print_hosts(rows: Sequence[Row]) -> None:
    """Two hosts beside one, by workload and number of users, and the published ratio."""
    found = {
        (row["system"], row["algorithm"], row["workload"], row["concurrency"]): row
        for row in rows
        if row.get("tokens_per_s") is not None
    }
    shown: list[Row] = []
    for (system, *cell), row in found.items():
        one = found.get(("eager", *cell))
        if system == two_hosts.SYSTEM and one is not None:
            algorithm, workload, users = cell
            ratio = row["tokens_per_s"] / one["tokens_per_s"]
            published = two_hosts.PAPER.get(users)
            values = {"two_over_one": ratio, "published_over_RoCE": published}
            shown.append({"algorithm": algorithm, "workload": workload, "N": users, **values})
    print_table(f"two hosts ({two_hosts.BETWEEN}) over one", shown)
