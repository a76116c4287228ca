"""Every snippet of the README and of ``docs/``: run where it can be, looked at where not, counted.

A page's blocks are run in order in one folder, as a reader would, against one server. With
TRSERVE_FULL=1 each ``trserve launch`` among them really starts and stops; else its settings are
resolved.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from tests.conftest import FULL
from tests.docs.commands import bench_flags, mentioned, simple_commands, wrong
from tests.docs.conftest import at_server
from tests.docs.pages import PAGES, ROOT, Snippet, problem, snippets, spans
from tests.serverproc import Server

LIMIT_S = 120.0 if FULL else 40.0
"""Of one snippet."""

COUNTS = {
    "run": 14,
    "launch": 6,
    "file": 3,
    "output": 3,
    "slow": 1,
    "lint": 17,
    "text": 2,
}
"""Blocks of all pages by what a test does with them (``tests/docs/pages.py``)."""
MIN_MENTIONS = 100
"""Commands named in the text; so many that the search for them is known to work."""

ALL = [snippet for page in PAGES for snippet in snippets(page)]
TOLD_APART = [snippet for snippet in ALL if problem(snippet) is None]
RUNNABLE = {
    page: [s for s in TOLD_APART if s.page == name]
    for page in PAGES
    if (name := str(page.relative_to(ROOT)))
}


def test_every_block_says_what_it_is() -> None:
    problems = [text for snippet in ALL if (text := problem(snippet))]
    assert not problems, "\n".join(problems)


def test_no_block_is_new() -> None:
    found = Counter(snippet.kind for snippet in TOLD_APART)
    listed = "\n".join(f"  {snippet.place} {snippet.kind}" for snippet in TOLD_APART)
    assert dict(found) == COUNTS, (
        "blocks were added, removed or are treated otherwise. Look at what becomes of yours: all "
        "are tested (`slow` ones with TRSERVE_FULL=1) but `lint` (```sh lint=REASON), for what "
        "needs a GPU, containers, a cluster, the network or a long time, and `text`, no code. Then "
        f"set COUNTS in tests/docs/test_snippets.py to {dict(found)}.\n{listed}"
    )


@pytest.mark.parametrize("snippet", TOLD_APART, ids=lambda snippet: snippet.place)
def test_a_block_is_well_formed(snippet: Snippet) -> None:
    if snippet.language in ("sh", "console"):
        subprocess.run(["bash", "-n"], input=snippet.commands, text=True, check=True, timeout=10)
        for words in simple_commands(snippet.commands):
            assert not (reason := wrong(words, complete=True)), f"{snippet.place}: {reason}"
    elif snippet.language == "python":
        ast.parse(snippet.text)
    elif snippet.language == "json":
        json.loads(snippet.text)
    elif snippet.language == "yaml":
        yaml.safe_load(snippet.text)


def test_commands_named_in_the_text_exist_with_their_flags() -> None:
    named = [(page.name, words) for page in PAGES for s in spans(page) if (words := mentioned(s))]
    reasons = [f"{page}: {why}" for page, words in named if (why := wrong(words, complete=False))]
    assert not reasons, "\n".join(reasons)
    assert len(named) >= MIN_MENTIONS


@pytest.mark.parametrize(
    "command",
    [
        "trserve launch --no-such-flag 1",
        "trserve lunch",
        "trserve plan --algorithm r3r",
        "python -m bench.soak --minute 60 --nonsense",
        "python -m bench.no_such_benchmark",
        "make coffee",
        'make serve ARGS="--no-such-flag"',
    ],
)
def test_a_wrong_command_is_found(command: str) -> None:
    assert [wrong(words, complete=True) for words in simple_commands(command)] != [None]


def test_flags_of_benchmarks_are_known() -> None:
    assert {"--json", "--minutes"} <= bench_flags("bench.soak")


@pytest.mark.parametrize("page", RUNNABLE, ids=lambda page: page.name)
def test_a_page_runs_from_top_to_bottom(
    page: Path, server: Server, shell: Mapping[str, str], checkout: Path
) -> None:
    printed = ""
    for snippet in RUNNABLE[page]:
        text = at_server(snippet.commands, server)
        if snippet.kind == "file":
            (checkout / snippet.words["file"]).write_text(text)
        elif snippet.kind == "output":
            _compare(snippet, printed, snippet.text)
        elif snippet.kind in ("run", "launch") or (FULL and snippet.kind == "slow"):
            printed = _run(snippet, text, shell, checkout)
            if snippet.language == "console":
                _compare(snippet, printed, snippet.output)


def _run(snippet: Snippet, text: str, shell: Mapping[str, str], folder: Path) -> str:
    """What the snippet prints; fails with all of it if its exit code is not 0."""
    program = [sys.executable, "-"] if snippet.language == "python" else ["bash", "-s"]
    # Of a console each command is shown, whatever it exits with: `trserve doctor` finds faults.
    strict = "" if snippet.language != "sh" else "set -euo pipefail\n"
    done = subprocess.run(
        program,
        input=strict + text,
        capture_output=True,
        text=True,
        cwd=folder,
        env=dict(shell),
        timeout=LIMIT_S,
    )
    said = f"{snippet.place}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert done.returncode == 0 or snippet.language == "console", said
    return done.stdout


def _compare(snippet: Snippet, printed: str, shown: str) -> None:
    """``...`` stands for anything; spaces, empty lines and rules of tables do not count."""
    plain, pattern = _words(printed), re.escape(_words(shown)).replace(r"\.\.\.", ".*")
    assert re.fullmatch(pattern, plain, re.DOTALL), (
        f"{snippet.place} shows\n{shown}\nbut what comes is\n{printed}"
    )


def _words(text: str) -> str:
    return " ".join(re.sub("─+", " ", text).split())
