"""What every benchmark shares: its flags, its table, its JSON envelope and its environment.

The envelope is that of the stable interfaces ("Benchmarks"). It names no host, user or path.
Knows nothing of what is measured.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, TypeVar

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

SCHEMA_VERSION: Final = 1
_PACKAGES: Final = ("torch", "transformers", "numpy", "trserve")
_PATH_FLAGS: Final = (
    *("--json", "--plot", "--model", "--problems"),
    *("--vllm-python", "--llama-python"),
    *("--dataset", "--trace-file", "--csv", "--markdown", "--lines"),
)
_HIDDEN_FLAGS: Final = ("--url",)
"""What names a host."""
_FILE_WIDTH: Final = 160
_ROOT: Final = Path(__file__).parent.parent

_REFRESH_S: Final = 0.25
_SHOWN: Final = threading.Lock()
"""Held by the bar that is shown."""

Row = dict[str, Any]
Item = TypeVar("Item")


def parser(name: str, description: str) -> argparse.ArgumentParser:
    """A parser with the flags that all benchmarks have; add those of the benchmark to it.

    From here on SIGTERM ends the process as Ctrl-C does, so that servers it started end with it.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    made = argparse.ArgumentParser(prog=f"python -m bench.{name}", description=description)
    made.add_argument("--quick", action="store_true", help="fewer settings, in a minute or two")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    made.add_argument("--plot", type=Path, metavar="FILE", help="draw the result there")
    return made


def report(
    name: str,
    args: argparse.Namespace,
    rows: Sequence[Row],
    title: str,
    plot: Callable[[Any, Sequence[Row]], None] | None = None,
    shown: Callable[[Row], Row] = dict,
) -> None:
    """Prints ``rows`` and does what the flags ask for.

    ``plot`` draws the rows on a matplotlib Axes; without it ``--plot`` is refused. ``shown`` makes
    of a row what the table has of it; nothing, and the row is left out.
    """
    print_table(title, [seen for row in rows if (seen := shown(row))])
    if args.json is not None:
        write_envelope(args.json, name, rows)
    if args.plot is not None:
        if plot is None:
            sys.exit(f"bench.{name} has no plot; leave --plot out")
        _draw(args.plot, rows, plot)


def write_envelope(path: Path, name: str, rows: Sequence[Row]) -> None:
    """Write the document of one run; ``path`` holds the one before or this one, never a part."""
    text = json.dumps(envelope(name, rows), indent=2) + "\n"
    if path.exists() and not path.is_file():  # a pipe or a terminal
        path.write_text(text)
        return
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(text)
    beside.replace(path)


def envelope(name: str, rows: Sequence[Row]) -> dict[str, Any]:
    """The JSON document of one run."""
    return {
        "schema_version": SCHEMA_VERSION,
        "name": name,
        "environment": environment(),
        "command": ["python", "-m", f"bench.{name}", *_without_folders(sys.argv[1:])],
        "results": list(rows),
    }


def environment() -> dict[str, Any]:
    """The machine and the versions that the numbers depend on."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "os": platform.system(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "packages": {package: _version(package) for package in _PACKAGES},
        "commit": _git("rev-parse", "HEAD"),
        "modified": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "load_1min": round(os.getloadavg()[0], 2),
    }


def print_table(title: str, rows: Sequence[Row]) -> None:
    """The rows as a table on standard output; the columns are the union of their keys."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = Table(title=title)
    for column in columns:
        numeric = any(isinstance(row.get(column), float | int) for row in rows)
        table.add_column(column, justify="right" if numeric else "left")
    for row in rows:
        # Errors quote paths and types in brackets, which would be taken for markup.
        table.add_row(*(escape(_cell(row.get(column))) for column in columns))
    console = Console()
    # Into a file or a pipe nothing is gained by squeezing columns into 80 characters.
    (console if console.is_terminal else Console(width=_FILE_WIDTH)).print(table)


class Bar:
    """A line on standard error of how far a run is; nothing where that is no terminal.

    It is drawn when told and at most every quarter of a second: no thread of it takes time from
    what is measured.
    """

    def __init__(self, shown: Progress, title: str, total: float | None) -> None:
        self._shown = shown
        self._task = shown.add_task(title, total=total)
        self._drawn_s = time.monotonic()
        shown.refresh()

    def advance(self, by: float = 1, text: str | None = None) -> None:
        """So much more is done; ``text`` takes the title's place."""
        if self._shown.disable:
            return
        self._shown.update(self._task, advance=by, description=text)
        now = time.monotonic()
        if now - self._drawn_s >= _REFRESH_S:
            self._drawn_s = now
            self._shown.refresh()


@contextmanager
def progress(title: str, total: float | None = None) -> Iterator[Bar]:
    """A bar that goes away at the end; without a ``total`` it only counts.

    Within another one nothing is shown.
    """
    console = Console(stderr=True)
    first = _SHOWN.acquire(blocking=False)
    columns = (
        *(TextColumn("{task.description}"), BarColumn()),
        *(MofNCompleteColumn(), TimeElapsedColumn()),
    )
    shown = Progress(
        *columns,
        console=console,
        auto_refresh=False,
        transient=True,
        redirect_stdout=False,  # what is printed meanwhile stays where it belongs
        disable=not (first and console.is_terminal),
    )
    try:
        with shown:
            yield Bar(shown, title, total)
    finally:
        if first:
            _SHOWN.release()


def track(items: Iterable[Item], title: str) -> Iterator[Item]:
    """``items``, with a bar of how many of them are done."""
    with progress(title, len(items) if isinstance(items, Sized) else None) as bar:
        for item in items:
            yield item
            bar.advance()


def _cell(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={_cell(item)}" for key, item in value.items())
    return str(value)


def _draw(path: Path, rows: Sequence[Row], plot: Callable[[Any, Sequence[Row]], None]) -> None:
    try:
        figure = importlib.import_module("matplotlib.figure").Figure(figsize=(7, 4.5))
    except ImportError:
        sys.exit("--plot needs matplotlib: pip install 'trserve[plot]'")
    plot(figure.add_subplot(), rows)
    figure.savefig(path, bbox_inches="tight")


def _without_folders(arguments: Sequence[str]) -> list[str]:
    """The arguments with files by their names alone, and without hosts."""
    shown: list[str] = []
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        if shown and shown[-1] in _HIDDEN_FLAGS:
            argument = "..."
        elif equals and flag in _HIDDEN_FLAGS:
            argument = f"{flag}=..."
        elif shown and shown[-1] in _PATH_FLAGS:
            argument = Path(argument).name
        elif equals and flag in _PATH_FLAGS:
            argument = f"{flag}={Path(value).name}"
        shown.append(argument)
    return shown


def _cpu_model() -> str:
    """As the kernel names it; AArch64 kernels give no name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    """The output of a git command on this tree; None where there is no git or no history."""
    try:
        run = subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=_ROOT)
    except FileNotFoundError:
        return None
    return run.stdout.strip() if run.returncode == 0 else None
