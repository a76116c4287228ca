"""What ``trserve top`` shows of one look at a server, as tables for a terminal of any width.

Knows the events of ``/v1/trserve/stats/stream`` and what ``/v1/trserve/about`` says; fetches
neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

KEYS: Final = "q quit   p pause   ? help"
HELP: Final = (
    "share: tokens not written by the first model.  rows: requests in a step.  B: requests that a "
    "model waits for before a step.  pending: requests that are at another model.  KV: blocks in "
    "use.  Latencies are those of the last minute."
)
_BARS: Final = "▁▂▃▄▅▆▇█"
_STATUS: Final = {"up": "green", "restarting": "yellow", "lost": "red"}
_TIMES: Final = {
    "queue": "queue",
    "first_token": "first token",
    "between_tokens": "between tokens",
    "request": "request",
}
_NOTHING: Final = "-"


def view(
    about: Mapping[str, Any], stats: Mapping[str, Any], rates: Sequence[float], footer: str
) -> RenderableType:
    """The whole screen.

    Args:
        about, stats: as the server tells them.
        rates: tokens per second of the last looks, the newest last.
        footer: the last line.
    """
    return Group(
        _headline(about, stats, rates),
        _models(stats),
        _routing(about, stats),
        _requests(stats),
        Text(footer, style="dim"),
    )


def sparkline(values: Sequence[float]) -> str:
    """A bar a value, the largest one full."""
    most = max(values, default=0.0)
    if most <= 0:
        return _BARS[0] * len(values)
    return "".join(_BARS[round((len(_BARS) - 1) * value / most)] for value in values)


def _headline(
    about: Mapping[str, Any], stats: Mapping[str, Any], rates: Sequence[float]
) -> RenderableType:
    line = Text(f"trserve {about['version']}  {about['device']}  ")
    line.append(stats["phase"], style="green" if stats["phase"] == "serving" else "yellow")
    line.append(f"  {stats['tokens_per_s']:.1f} tokens/s")
    if predicted := stats["predicted_tokens_per_s"]:
        line.append(f" (predicted {predicted:.1f})")
    line.append(f"  {sparkline(rates)}", style="cyan")
    return line


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=True)
    return table


def _models(stats: Mapping[str, Any]) -> Table:
    columns = ("model", "status", "tokens/s", "running", "pending", "steps/s", "rows", "B", "KV")
    table = _table("models", *columns)
    for model in stats["models"]:
        table.add_row(
            model["name"],
            Text(model["status"], style=_STATUS.get(model["status"], "")),
            f"{model['tokens_per_s']:.1f}",
            str(model["running"]),
            str(model["pending"]),
            f"{model['steps_per_s']:.1f}",
            _number(model["rows_mean"]),
            str(model["batch_threshold"]),
            f"{model['kv_used']:.0%}",
        )
    return table


def _routing(about: Mapping[str, Any], stats: Mapping[str, Any]) -> Table:
    table = _table("routing", "router", "parameters", "share", "handoffs/s", "why steps began")
    parameters = about["router"]["parameters"]
    table.add_row(
        about["router"]["name"],
        ", ".join(f"{each['name']}={_number(each['value'])}" for each in parameters) or _NOTHING,
        _NOTHING if stats["share"] is None else f"{stats['share']:.1%}",
        f"{stats['handoffs_per_s']:.1f}",
        _openings(stats["models"]) or _NOTHING,
    )
    return table


def _openings(models: Sequence[Mapping[str, Any]]) -> str:
    """How often each reason let a step begin, over all models."""
    counts: dict[str, int] = {}
    for model in models:
        for reason, count in model["openings"].items():
            counts[reason] = counts.get(reason, 0) + count
    return ", ".join(f"{reason} {count}" for reason, count in counts.items() if count)


def _requests(stats: Mapping[str, Any]) -> Table:
    requests = stats["requests"]
    title = (
        f"requests: {requests['live']} live, {requests['waiting']} waiting, "
        f"{stats['requests_per_s']:.1f}/s ended"
    )
    table = _table(title, "ms", "p50", "p90", "p99", "count")
    for name, label in _TIMES.items():
        found = stats["latency_ms"][name]
        cells = (_number(found[share]) for share in ("p50", "p90", "p99"))
        table.add_row(label, *cells, str(found["count"]))
    return table


def _number(value: float | None) -> str:
    return _NOTHING if value is None else f"{value:.4g}"
