"""Writes ``docs/reference.md`` from the code: ``python -m docs.make_reference``.

Names, signatures and docstrings are those of ``trserve.__all__``, routes those of the OpenAPI
document, flags those of the command line. Knows no fact of its own; ``tests/docs`` holds the file
against what this makes.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, ForwardRef

import click

import trserve
from trserve.cli import PURPOSES
from trserve.config import GROUPS, flag_name
from trserve.gateway.openapi import document
from trserve.launch_options import TOPICS, launch_options

TARGET: Final = Path(__file__).with_name("reference.md")

_HEAD: Final = """# Reference

Made from the code by `python -m docs.make_reference`, and tested to be what that makes; change
docstrings and help texts, not this page. What things are for: [Python](python.md),
[routers](routers.md), [the HTTP API](api.md), [settings](operate.md).
"""
_SECTION: Final = re.compile(r"(Args|Attributes|Returns|Raises|Yields):")
_ROLE: Final = re.compile(r":(?:class|meth|func|mod|attr):`~?([^`]+)`")
_ITEM: Final = re.compile(r"([\w, *]+): (.*)")


def reference() -> str:
    """The page."""
    parts = [_HEAD, *_python(), *_http(), *_command_line()]
    return "\n".join(parts).rstrip() + "\n"


def _python() -> Iterator[str]:
    yield "## Python: `import trserve`\n"
    for name in trserve.__all__:
        yield from _class(name, getattr(trserve, name))


def _class(name: str, home: type) -> Iterator[str]:
    yield f"### {name}\n"
    # Exceptions have the signature of their base, and a protocol is never called.
    if not issubclass(home, Exception) and not getattr(home, "_is_protocol", False):
        yield f"`{name}{_signature(home)}`\n"
    yield _markdown(inspect.getdoc(home) or "")
    members = [
        line
        for member, value in vars(home).items()
        if not member.startswith("_") and (line := _member(member, value))
    ]
    if members:
        yield "\n".join(members) + "\n"


def _member(name: str, value: object) -> str:
    """A line of a list for a public method or property that says what it is, else nothing."""
    doc = inspect.getdoc(value)
    if isinstance(value, property) and doc:
        returns = inspect.signature(value.fget).return_annotation if value.fget else ""
        return _indented(f"- **`{name}`**: `{returns}`", doc)
    if inspect.isfunction(value) and doc:
        return _indented(f"- **`{name}{_signature(value)}`**", doc)
    return ""


def _indented(head: str, doc: str) -> str:
    lines = ["", *_markdown(doc).splitlines()]
    return head + "\n".join(f"  {line}".rstrip() for line in lines)


def _signature(called: Any) -> str:
    """``(a: int, *, b: str = '') -> bool`` without the quotes of annotations kept as texts."""
    found = inspect.signature(called)
    shown = [_argument(each) for each in found.parameters.values() if each.name != "self"]
    kinds = [each.kind for each in found.parameters.values() if each.name != "self"]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        shown.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    returns = found.return_annotation
    known = inspect.isfunction(called) and returns is not inspect.Signature.empty
    return f"({', '.join(shown)})" + (f" -> {returns}" if known else "")


_STARS: Final[Mapping[Any, str]] = {
    inspect.Parameter.VAR_POSITIONAL: "*",
    inspect.Parameter.VAR_KEYWORD: "**",
}


def _argument(each: inspect.Parameter) -> str:
    text = _STARS.get(each.kind, "") + each.name
    if each.annotation is not inspect.Parameter.empty:
        text += f": {_annotation(each.annotation)}"
    return text if each.default is inspect.Parameter.empty else f"{text} = {each.default!r}"


def _annotation(kind: Any) -> str:
    if isinstance(kind, ForwardRef):
        return kind.__forward_arg__
    shown = kind if isinstance(kind, str) else inspect.formatannotation(kind)
    return shown.replace("collections.abc.", "").replace("typing.", "")


def _markdown(doc: str) -> str:
    """A docstring: its sections become lists, its roles and double backquotes code."""
    out: list[str] = []
    listing = False
    for line in _ROLE.sub(r"`\1`", doc).replace("``", "`").splitlines():
        if heading := _SECTION.fullmatch(line):
            listing = True
            out += [f"*{heading[1]}*", ""]
        elif not listing or not line.startswith("    "):
            listing = listing and not line
            out.append(line)
        elif not line.startswith("     ") and (item := _ITEM.fullmatch(line.strip())):
            out.append(f"- `{item[1]}`: {item[2]}")
        else:
            out.append(f"  {line.strip()}" if out[-1].startswith(("- ", "  ")) else line.strip())
    return "\n".join(out).rstrip() + "\n"


def _http() -> Iterator[str]:
    made = json.loads(document())
    yield "## HTTP\n"
    yield (
        "Errors are `{error: {message, type, param, code}}`; 401 and 405 are left out below. "
        "`GET /openapi.json` has the same as a schema.\n"
    )
    rows = [
        _route(method, path, operation)
        for path, methods in made["paths"].items()
        for method, operation in methods.items()
    ]
    yield _table(("route", "", "body", "answer", "errors"), rows)
    schemas = made["components"]["schemas"]
    for name in _bodies(made["paths"], schemas):
        yield f"**{name}**: {_members(schemas[name])}.\n"


def _route(method: str, path: str, operation: Mapping[str, Any]) -> Sequence[str]:
    body = operation.get("requestBody", {}).get("content", {}).values()
    answers = operation["responses"]["200"]["content"]
    statuses = [code for code in operation["responses"] if code not in ("200", "401", "405")]
    return (
        f"`{method.upper()} {path}`",
        operation["summary"],
        " ".join(_type(each["schema"]) for each in body),
        ", ".join(_answer(kind, each["schema"]) for kind, each in answers.items()),
        " ".join(statuses),
    )


def _answer(kind: str, schema: Mapping[str, Any]) -> str:
    return {"text/event-stream": "events", "text/plain": "text"}.get(kind) or _type(schema)


def _bodies(paths: Mapping[str, Any], schemas: Mapping[str, Any]) -> list[str]:
    """Names of the bodies' schemas, and of those that they refer to."""
    bodies = [each.get("requestBody") for path in paths.values() for each in path.values()]
    names = _references(json.dumps(bodies))
    for name in names:
        names += [more for more in _references(json.dumps(schemas[name])) if more not in names]
    return names


def _references(text: str) -> list[str]:
    return list(dict.fromkeys(re.findall(r'"#/components/schemas/(\w+)"', text)))


def _members(schema: Mapping[str, Any]) -> str:
    return ", ".join(f"`{name}` {_type(each)}" for name, each in schema["properties"].items())


def _type(schema: Mapping[str, Any]) -> str:
    """A word or two for a schema; that anything may be null is said once, in the API's page."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema:
        kinds = [_type(each) for each in schema["anyOf"]]
        either = [kind for kind in dict.fromkeys(kinds) if kind != "null"]
        return " or ".join(kind for kind in either if kind != "integer" or "number" not in either)
    return str(schema.get("type") or json.dumps(schema.get("const", "any")).strip('"'))


def _command_line() -> Iterator[str]:
    yield "## `trserve launch`\n"
    yield (
        "Each is also `TRSERVE_NAME` in the environment, and a line of the YAML file that "
        "`--config` names ([settings](operate.md#settings)).\n"
    )
    by_flag = {_names(each)[0]: each for each in launch_options() if isinstance(each, click.Option)}
    for topic, group in GROUPS.items():
        yield f"**{TOPICS[topic]}**\n"
        flags = (flag_name(setting) for setting in group.__dataclass_fields__.values())
        yield _table(("flag", ""), [_flag(by_flag[flag]) for flag in flags])
    yield "## Other commands\n"
    for purpose in PURPOSES.values():
        for command in purpose:
            if command.name != "launch":
                yield from _command(f"trserve {command.name}", command, set(by_flag))


def _command(path: str, command: click.Command, settings: set[str]) -> Iterator[str]:
    if isinstance(command, click.Group):
        for name, inner in command.commands.items():
            yield from _command(f"{path} {name}", inner, settings)
        return
    context = click.Context(command)
    arguments = [
        f" {p.make_metavar(context)}" for p in command.params if isinstance(p, click.Argument)
    ]
    options = [each for each in command.params if isinstance(each, click.Option)]
    own = [each for each in options if _names(each)[0] not in settings]
    # Some commands have one or two flags of the same names, as `chat` has --api-key.
    as_launch = len(options) - len(own) > len(settings) // 2
    yield f"### `{path}{''.join(arguments)}`\n"
    yield command.get_short_help_str(200) + as_launch * " It takes the flags of `launch`." + "\n"
    if listed := own if as_launch else options:
        yield _table(("flag", ""), [_flag(each) for each in listed])


def _names(each: click.Option) -> list[str]:
    return sorted(each.opts, key=lambda name: not name.startswith("--"))


def _flag(each: click.Option) -> Sequence[str]:
    record = each.get_help_record(click.Context(click.Command("trserve")))
    if record is None:
        raise ValueError(f"{each.name} is hidden: leave it out of the reference")
    return (f"`{record[0]}`", record[1])


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


if __name__ == "__main__":
    TARGET.write_text(reference())
    sys.stdout.write(f"wrote docs/{TARGET.name}\n")
