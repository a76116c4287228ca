"""Whether commands in the documents exist, with the flags that they are given there.

The parsers asked are those that the commands have: click's of ``trserve``, argparse's of
``bench``, the Makefile's targets. Runs none of them.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from unittest import mock

import click

from tests.docs.pages import ROOT
from trserve.cli import main

_BETWEEN = "();&|\n"
_COMMENT = re.compile(r"(?:^|(?<=\s))#.*$", re.MULTILINE)
_ASSIGNMENT = re.compile(r"\w+=")


def simple_commands(text: str) -> Iterator[list[str]]:
    """The words of each command of a shell text, without variables before it and redirections."""
    joined = _COMMENT.sub("", re.sub(r"\\\n", " ", text))
    lexer = shlex.shlex(joined, posix=True, punctuation_chars=_BETWEEN)
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t", True, ""
    command: list[str] = []
    for word in [*lexer, ";"]:
        if word.strip(_BETWEEN):
            command.append(word)
        elif command:
            yield _bare(command)
            command = []


def _bare(words: Sequence[str]) -> list[str]:
    left = list(words)
    while left and _ASSIGNMENT.match(left[0]):
        left.pop(0)
    cut = next((i for i, word in enumerate(left) if word[:1] in "<>" or word[:2] == "2>"), None)
    return left[:cut]


def mentioned(span: str) -> list[str] | None:
    """The words of a command that the text names, or None if it names none."""
    if not re.match(r"(trserve|python -m (bench|trserve|docs)\S*|make) ?", span + " "):
        return None
    try:
        return next(simple_commands(span), None)
    except ValueError:  # an apostrophe: words, no command
        return None


def wrong(words: Sequence[str], *, complete: bool) -> str | None:
    """What is wrong with a command, or None; nothing is if it is none of the project's.

    One that is not ``complete`` is only named in a text: flags may lack their values, and a word
    in capitals stands for something.
    """
    program = words[0].rpartition("/")[2] if words else ""
    if program == "trserve":
        return _trserve(list(words[1:]), complete)
    if program in ("python", "python3") and words[1:2] == ["-m"] and len(words) > 2:
        return _module(words[2], list(words[3:]), complete)
    if program == "make":
        return _make(words[1:], complete)
    return None


def _trserve(arguments: list[str], complete: bool) -> str | None:
    command: click.Command = main
    path = "trserve"
    while isinstance(command, click.Group) and arguments and not arguments[0].startswith("-"):
        name = arguments[0]
        if name not in command.commands:
            return None if _stands_for(name) else f"{path} has no command {name}"
        command, path = command.commands[name], f"{path} {name}"
        arguments = arguments[1:]
    if "--help" in arguments:
        return None
    if not complete:
        known = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
        return _unknown(path, arguments, known | {"--help", "--version", "-h"})
    try:
        command.make_context(path, arguments)
    except click.UsageError as error:
        # A file of the example need not be here when it is only looked at.
        missing_file = isinstance(error, click.BadParameter) and "does not exist" in error.message
        return None if missing_file else f"{path}: {error.format_message()}"
    return None


def _module(name: str, arguments: list[str], complete: bool) -> str | None:
    if _stands_for(name.rpartition(".")[2]):
        return None
    if importlib.util.find_spec(name) is None:
        return f"there is no module {name}"
    if not name.startswith("bench."):
        return None
    if complete:
        return _refusal(name, arguments)
    return _unknown(f"python -m {name}", arguments, bench_flags(name))


class _Parsed(Exception):
    """Carries the parser out of a benchmark before it begins."""


def _asked(name: str, arguments: list[str], then: Callable[..., None]) -> None:
    with (
        mock.patch.object(argparse.ArgumentParser, "parse_args", then),
        mock.patch.object(sys, "argv", [name, *arguments]),
    ):
        importlib.import_module(name).main()


@cache
def bench_flags(name: str) -> frozenset[str]:
    """The flags of a benchmark."""

    def keep(parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        raise _Parsed(*parser._option_string_actions)

    try:
        _asked(name, [], keep)
    except _Parsed as found:
        return frozenset(found.args)
    raise AssertionError(f"{name} did not parse its arguments")


def _refusal(name: str, arguments: list[str]) -> str | None:
    parse = argparse.ArgumentParser.parse_args
    said: list[str] = []

    def refuse(parser: argparse.ArgumentParser, message: str) -> None:
        said.append(message)
        raise _Parsed

    def check(parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        with mock.patch.object(argparse.ArgumentParser, "error", refuse):
            parse(parser, arguments)
        raise _Parsed

    try:
        _asked(name, arguments, check)
    except _Parsed:
        return f"python -m {name}: {said[0]}" if said else None
    raise AssertionError(f"{name} did not parse its arguments")


def _make(words: Sequence[str], complete: bool) -> str | None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for word in words:
        if "=" not in word and word not in targets and not word.startswith("-"):
            return None if _stands_for(word) else f"there is no target {word}: make has {targets}"
        if word.startswith("ARGS=") and "serve" in words:
            return _trserve(["launch", *shlex.split(word[len("ARGS=") :])], complete)
    return None


def _unknown(path: str, arguments: Sequence[str], known: set[str] | frozenset[str]) -> str | None:
    flags = (each.partition("=")[0] for each in arguments if each.startswith("-"))
    extra = [each for each in flags if each not in known and not re.match(r"-[\d.]", each)]
    return f"{path} has no {', '.join(extra)}" if extra else None


def _stands_for(word: str) -> bool:
    return word.isupper() or word in ("...", "X")
