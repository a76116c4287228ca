"""Rows of ``bench.serve`` as a table, as CSV, as Markdown and as a picture. Measures nothing."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.common import Row
from bench.serve_metrics import Sample, pooled

_SHORT: Final = {
    "concurrency": "N",
    "request_rate": "rate",
    "completed": "ok",
    "failed": "failed",
    "requests_per_s": "req/s",
    "tokens_per_s": "tok/s",
    "per_user_tokens_per_s": "/user",
    "p50_ttft_ms": "ttft p50",
    "p99_ttft_ms": "p99",
    "p50_tpot_ms": "tpot p50",
    "p99_tpot_ms": "p99 ",
    "p50_itl_ms": "itl p50",
    "p99_itl_ms": "p99  ",
    "p50_e2e_ms": "e2e p50",
    "p99_e2e_ms": "p99   ",
    "goodput_per_s": "goodput/s",
    "llm_share": "LLM",
    "handoffs_per_request": "handoffs",
}
"""Columns of the printed table, times in milliseconds; the files have all."""


def short(row: Row) -> Row:
    """A row as the printed table has it, without what nothing is known of."""
    return {name: row[key] for key, name in _SHORT.items() if row.get(key) is not None}


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """One line a row, one column a key; mappings and lists are JSON within it."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows([_plain(row.get(column)) for column in columns] for row in rows)


def _plain(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, dict | list) else value


def write_markdown(path: Path, rows: Sequence[Row]) -> None:
    """The printed table's columns, to be pasted."""
    columns = [key for key in _SHORT if any(row.get(key) is not None for row in rows)]
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        lines.append("| " + " | ".join(_cell(row.get(column)) for column in columns) + " |")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) and abs(value) < 1e4 else f"{value:.0f}"


def plot(axes: Any, rows: Sequence[Row], samples: Sequence[Sample]) -> None:
    """Of several rows throughput against a user's speed; of one how its latencies are spread."""
    if len(rows) > 1:
        points = [(row["per_user_tokens_per_s"] or 0.0, row["tokens_per_s"]) for row in rows]
        axes.plot([x for x, _ in points], [y for _, y in points], "o-")
        for row, point in zip(rows, points, strict=True):
            axes.annotate(f"{row['request_rate'] or row['concurrency']:g}", point)
        axes.set(xlabel="tokens/s per user", ylabel="tokens/s", title=rows[0]["workload"])
        return
    for name in ("ttft", "tpot", "itl", "e2e"):
        values = np.sort(pooled(samples, name))
        if len(values):
            shares = np.arange(1, len(values) + 1) / len(values)
            axes.step(values, shares, where="post", label=name.upper())
    axes.set(xlabel="ms", ylabel="share of answers, or of events", xscale="log", ylim=(0, 1.02))
    axes.legend()
