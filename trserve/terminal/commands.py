"""What a line that begins with a slash does in a chat. Knows a conversation; no terminal.

Each command takes the rest of its line and returns what to tell; CommandError says what is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Final

import orjson

from trserve.config_values import parse_assignments
from trserve.errors import TrserveError
from trserve.terminal.conversation import Answer, Conversation, require_model

_DEFAULT: Final = "default"


class CommandError(TrserveError):
    """A command that cannot be done as it was given."""


def run(conversation: Conversation, line: str) -> str:
    """What the command in ``line`` tells. Raises CommandError, ServerError, EOFError to end."""
    name, _, rest = line[1:].partition(" ")
    command = COMMANDS.get(name)
    if command is None:
        raise CommandError(f"no command /{name}; /help lists them")
    return command[0](conversation, rest.strip())


def _threshold(conversation: Conversation, rest: str) -> str:
    if not conversation.parameters:
        raise CommandError(f"the router {conversation.about['router']['name']} has no threshold")
    name = conversation.parameters[0]["name"]
    return _router(conversation, f"{name}={rest}" if rest else "")


def _router(conversation: Conversation, rest: str) -> str:
    if rest == _DEFAULT:
        conversation.settings.router.clear()
    elif rest:
        try:
            pairs = parse_assignments(rest)
        except ValueError as error:
            raise CommandError(f"{error}; write /router name=number,...") from None
        values = {name: _value(conversation, name, text) for name, text in pairs}
        for name, value in values.items():
            conversation.settings.router.pop(name, None)
            if value is not None:
                conversation.settings.router[name] = value
    return _routing(conversation)


def _value(conversation: Conversation, name: str, text: str) -> float | None:
    """The number, None for the server's own."""
    known = {each["name"]: each for each in conversation.parameters}
    if name not in known:
        names = ", ".join(known) or "none"
        raise CommandError(f"no parameter {name} that a request may set; there are: {names}")
    if text == _DEFAULT:
        return None
    try:
        value = float(text)
    except ValueError:
        raise CommandError(f"{name}={text}: give a number, or {_DEFAULT}") from None
    low, high = known[name]["minimum"], known[name]["maximum"]
    if not (low is None or value >= low) or not (high is None or value <= high):
        ends = f"{_shown(low, '-inf')} to {_shown(high, 'inf')}"
        raise CommandError(f"{name}={text}: must be {ends}")
    if not math.isfinite(value):
        raise CommandError(f"{name}={text}: give a finite number")
    return value


def _shown(value: float | None, otherwise: str) -> str:
    return otherwise if value is None else f"{value:g}"


def _routing(conversation: Conversation) -> str:
    own = conversation.settings.router
    lines = [f"router {conversation.about['router']['name']}"]
    for each in conversation.parameters:
        name = each["name"]
        value = f"{own[name]:g} in this chat" if name in own else _shown(each["value"], "its own")
        lines.append(f"  {name} = {value}: {each['help']}")
    return "\n".join(lines)


def _only(conversation: Conversation, rest: str) -> str:
    if not rest or rest == _DEFAULT:
        conversation.settings.only = None
        return "all models write"
    conversation.settings.only = require_model(conversation, rest)
    return f"{rest} writes everything"


def _stats(conversation: Conversation, rest: str) -> str:
    if not conversation.answers:
        raise CommandError("nothing was answered yet")
    return "\n".join([summary(conversation.answers[-1]), _total(conversation)])


def summary(answer: Answer) -> str:
    """One line about an answer: who wrote how much of it, and how long it took."""
    if answer.usage is None:
        return f"stopped after {answer.total_s:.2f} s"
    own = answer.usage["trserve"]
    total = answer.usage["completion_tokens"]
    who = ", ".join(f"{name} {count}" for name, count in own["tokens"].items())
    parts = [f"{total} tokens: {who}", f"share {own['share']:.1%}", f"{own['handoffs']} handoffs"]
    if own["pending_ms"]:
        parts.append(f"{own['pending_ms']:.1f} ms away from the first model")
    if answer.first_s is not None:
        parts.append(f"first text after {answer.first_s * 1e3:.0f} ms")
    parts.append(f"{answer.total_s:.2f} s, {total / max(answer.total_s, 1e-9):.1f} tokens/s")
    if own["degraded"]:
        parts.append("DEGRADED: a model is lost")
    return "; ".join(parts)


def _total(conversation: Conversation) -> str:
    counts: dict[str, int] = {}
    for answer in conversation.answers:
        for name, count in ((answer.usage or {}).get("trserve") or {}).get("tokens", {}).items():
            counts[name] = counts.get(name, 0) + count
    who = ", ".join(f"{name} {count}" for name, count in counts.items()) or "none"
    return f"{len(conversation.answers)} answers of this chat: {who}"


def _save(conversation: Conversation, rest: str) -> str:
    if not rest:
        raise CommandError("name a file: /save FILE")
    path = Path(rest).expanduser()
    try:
        with path.open("xb") as file:
            file.write(orjson.dumps(conversation.to_json(), option=orjson.OPT_INDENT_2))
    except FileExistsError:
        raise CommandError(f"{path} is there already; name another file") from None
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror}") from None
    return f"{len(conversation.answers)} answers with their traces are in {path}"


def _clear(conversation: Conversation, rest: str) -> str:
    conversation.clear()
    return "a new conversation; /save still has the old one"


def _quit(conversation: Conversation, rest: str) -> str:
    raise EOFError  # as the end of input is


def _help(conversation: Conversation, rest: str) -> str:
    return "\n".join(f"{usage:28}{text}" for _, usage, text in COMMANDS.values())


Command = Callable[[Conversation, str], str]

COMMANDS: Final[dict[str, tuple[Command, str, str]]] = {
    "threshold": (_threshold, "/threshold [X|default]", "the router's first parameter"),
    "router": (_router, "/router [NAME=X,...|default]", "the router and its parameters"),
    "only": (_only, "/only [NAME]", "have one model write all; without a name, all of them"),
    "stats": (_stats, "/stats", "who wrote how much of the last answer, and how fast"),
    "save": (_save, "/save FILE", "write what was said, and who wrote it, as JSON"),
    "clear": (_clear, "/clear", "begin a new conversation"),
    "help": (_help, "/help", "this list"),
    "quit": (_quit, "/quit", "end the chat, as Ctrl-D does"),
}
"""By name: what it does, how it is written, and what the list says of it."""


def known_names() -> list[str]:
    """Of all commands, with their slashes."""
    return [f"/{name}" for name in COMMANDS]
