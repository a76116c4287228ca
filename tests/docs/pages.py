"""The README and ``docs/*.md`` as data: fenced blocks, commands in the text, links and headings.

Knows Markdown as far as these pages use it, and how a block's info string says what is to be done
with it; runs nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
GENERATED = ROOT / "docs" / "reference.md"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))

REASONS = ("gpu", "container", "cluster", "network", "time")
"""What a block may lack to be run in a test: ```` ```sh lint=container ````."""
LANGUAGES = ("sh", "console", "python", "json", "yaml", "text")
_FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`([^`]+)`")
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_IMAGE = re.compile(r"<(?:img|source)[^>]*\bsrc(?:set)?=\"([^\"]+)\"")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Snippet:
    """A fenced block; ``words`` follow its language: ``file=NAME``, ``lint=REASON``, ..."""

    page: str
    line: int
    language: str
    words: dict[str, str] = field(hash=False)
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def kind(self) -> str:
        """What a test does with it.

        ``launch``: its server is started with full counts, else its settings are resolved;
        ``run``: it is run; ``slow``: the same, with full counts; ``file``: it is written down for
        what follows; ``output``: what came before printed it; ``lint``: only its syntax and flags
        are checked; ``text``: nothing.
        """
        for word in ("lint", "file", "output", "slow"):
            if word in self.words:
                return word
        if self.language in ("sh", "console"):
            return "launch" if re.search(r"\btrserve launch\b", self.text) else "run"
        return {"python": "run", "text": "text"}.get(self.language, "lint")

    @property
    def commands(self) -> str:
        """What a shell is given: all of it, or what stands behind ``$`` in a console."""
        if self.language != "console":
            return self.text
        lines = [line[2:] for line in self.text.splitlines() if line.startswith("$ ")]
        return "\n".join(lines) + "\n"

    @property
    def output(self) -> str:
        """What a console shows below its commands."""
        return "\n".join(line for line in self.text.splitlines() if not line.startswith("$ "))


def problem(snippet: Snippet) -> str | None:
    """Why nobody knows what to do with a block, and what its author should do; or None."""
    if snippet.language not in LANGUAGES:
        return (
            f"{snippet.place}: a block needs one of the languages {', '.join(LANGUAGES)} behind "
            f"its fence, not {snippet.language!r}: sh (commands), console ('$ ' before commands, "
            "then their output, '...' for what differs), python, json, yaml, or text (no code)"
        )
    if snippet.words.get("lint", REASONS[0]) not in REASONS:
        return f"{snippet.place}: the reason of lint is one of {', '.join(REASONS)}"
    if unknown := set(snippet.words) - {"lint", "file", "output", "slow"}:
        return f"{snippet.place}: {unknown}: there are file=NAME, lint=REASON, output, slow"
    return None


def snippets(path: Path) -> list[Snippet]:
    """The blocks of a page, in order."""
    text, name = path.read_text(), str(path.relative_to(ROOT))
    found = []
    for match in _FENCE.finditer(text):
        language, *words = match[1].split() or [""]
        pairs = dict(word.partition("=")[::2] for word in words)
        line = text.count("\n", 0, match.start()) + 1
        found.append(Snippet(name, line, language, pairs, match[2]))
    return found


def spans(path: Path) -> list[str]:
    """What stands in backquotes in the text, on one line each."""
    return [" ".join(each.split()) for each in _SPAN.findall(_prose(path))]


def links(path: Path) -> list[str]:
    """Targets of links and pictures within the repository."""
    text = _prose(path)
    targets = [*_LINK.findall(text), *_IMAGE.findall(text)]
    return [each for each in targets if not re.match(r"[a-z]+:", each)]


def anchors(path: Path) -> set[str]:
    """The names under which a page's headings can be linked to, as GitHub makes them."""
    plain = (re.sub(r"[^\w\- ]", "", each.lower()) for each in _HEADING.findall(_prose(path)))
    return {each.replace(" ", "-") for each in plain}


def _prose(path: Path) -> str:
    return _FENCE.sub("", path.read_text())
