"""Chat messages to prompt text, by the template that a checkpoint brings.

Renders as ``transformers``' ``apply_chat_template`` does (a test holds the two together) without
importing it. Knows nothing of tokens, files, HTTP or models; a template is untrusted code, so it
runs in jinja2's immutable sandbox and sees plain JSON values only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from trserve.errors import ConfigError, RequestError

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
RESERVED_KWARGS = ("messages", "add_generation_prompt", "chat_template", "continue_final_message")
"""Names that ``chat_template_kwargs`` may not set: each has a request field of its own, or none."""


class NormalMessages(list[dict[str, Any]]):
    """What :func:`normalize_messages` has been through, and need not go through again."""


_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
_REASONING_NAMES = frozenset(_REASONING_FIELDS)


class ChatTemplate:
    """The compiled template, or the compiled set of named templates, of one checkpoint.

    Args:
        source: jinja2 text, or the texts by name (``default``, ``tool_use``, ...).
        variables: what the template sees beside the messages, ``bos_token`` and the like.

    Attributes:
        takes_tools: whether it shows tools to the model.
        has_reasoning: whether it knows of ``<think>`` and ``</think>``.
        has_elements: whether it shows parameters of tools as elements, as Qwen3-Coder's.

    Raises:
        ConfigError: a text is not valid jinja2.
    """

    def __init__(
        self, source: str | Mapping[str, str], variables: Mapping[str, str] | None = None
    ) -> None:
        texts = {"default": source} if isinstance(source, str) else source
        environment = _environment()
        self._templates = {name: _compile(environment, name, texts[name]) for name in texts}
        self._variables: dict[str, Any] = {
            **environment.globals,
            "tools": None,
            "documents": None,
            **(variables or {}),
        }
        self.takes_tools = "tool_use" in texts or any("tools" in text for text in texts.values())
        self.has_reasoning = any("</think>" in text for text in texts.values())
        self.has_elements = any(
            "<function=" in text and "<parameter=" in text for text in texts.values()
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of ``messages``.

        Args:
            messages: as a request has them, or as :func:`normalize_messages` left them.
            add_generation_prompt: end with the header of the assistant's turn.
            continue_final_message: end with the content of the last message instead.
            kwargs: further template variables (``enable_thinking``, ``tools``, ``documents``).

        Raises:
            RequestError: malformed messages, or the template refused them; then the message is
                the template's own.
        """
        variables = dict(self._variables)
        if kwargs:
            variables.update(_checked_kwargs(kwargs))
        variables["messages"] = [_with_reasoning(m) for m in normalize_messages(messages)]
        variables["add_generation_prompt"] = add_generation_prompt
        template = self._select(tools=variables["tools"] is not None)
        environment = template.environment
        try:
            # As ``template.render``, which walks through all globals for each text: to copy them,
            # and to know their names in what is imported, of which here is nothing.
            context = environment.context_class(
                environment, variables, template.name, template.blocks
            )
            text = "".join(template.root_render_func(context))
        except Exception as error:
            # Whatever a template raises (its own refusal, a type error, a range too large, the
            # sandbox) was brought about by these messages and must not be a 500.
            raise RequestError(
                f"the chat template refuses these messages: {error}", param="messages"
            ) from error
        return _up_to_final(text, variables["messages"][-1]) if continue_final_message else text

    def _select(self, *, tools: bool) -> jinja2.Template:
        """With several templates, ``tool_use`` where tools are given, else ``default``."""
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            names = ", ".join(sorted(self._templates))
            raise RequestError(
                f"the model has the chat templates {names} but no default one; send a prompt to "
                "/v1/completions, or start the server with --chat-template",
                param="messages",
            )
        return self._templates[name]


def _up_to_final(text: str, message: Mapping[str, Any]) -> str:
    """``text`` up to the end of the last message's content, as ``transformers`` cuts it."""
    content = message.get("content", "")
    start = text.rfind(content.strip()) if content.strip() else -1
    if start < 0:
        raise RequestError(
            "continue_final_message needs a last message whose content the chat template shows",
            param="continue_final_message",
        )
    whole = content.lstrip()
    end = start + len(whole if text.startswith(whole, start) else whole.rstrip())
    return text[:end]


def normalize_messages(messages: Sequence[Mapping[str, Any]]) -> NormalMessages:
    """Checked copies of ``messages`` as templates expect them; applying it twice changes nothing.

    Members that are null are dropped (a template would print "None"), a list of text parts
    becomes one string, its parts on separate lines as vLLM joins them, and a tool call's
    ``arguments`` become an object where the client sent JSON text.

    Raises:
        RequestError: naming the message and the part.
    """
    if isinstance(messages, NormalMessages):
        return messages
    if not messages:
        raise RequestError("messages is empty; send at least one message", param="messages")
    return NormalMessages([_message(message, i) for i, message in enumerate(messages)])


def _message(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    if type(message) is not dict and not isinstance(message, Mapping):
        raise RequestError(
            f"messages[{index}] must be an object with a role and content",
            param=f"messages[{index}]",
        )
    plain = {key: value for key, value in message.items() if value is not None}
    role = plain.get("role")
    if not isinstance(role, str) or role not in ROLES:
        where = f"messages[{index}].role"
        raise RequestError(f"{where} must be one of {', '.join(sorted(ROLES))}", param=where)
    if not isinstance(plain.get("content", ""), str):
        plain["content"] = _content_text(plain["content"], f"messages[{index}].content")
    if "tool_calls" in plain:
        plain["tool_calls"] = _tool_calls(plain["tool_calls"], f"messages[{index}].tool_calls")
    return plain


def _content_text(content: Any, where: str) -> str:
    if not isinstance(content, list):
        raise RequestError(f"{where} must be a string or a list of text parts", param=where)
    return "\n".join(_part_text(part, f"{where}[{j}]") for j, part in enumerate(content))


def _part_text(part: Any, where: str) -> str:
    if not isinstance(part, Mapping):
        raise RequestError(f'{where} must be an object {{"type": "text", ...}}', param=where)
    if part.get("type") != "text":
        raise RequestError(
            f'{where} is not a text part; this server takes only parts of type "text"', param=where
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise RequestError(f"{where}.text must be a string", param=f"{where}.text")
    return text


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise RequestError(f"{where} must be a list of objects", param=where)
    return [_with_parsed_arguments(call) for call in calls]


def _with_parsed_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    """``arguments`` is JSON text on the wire; templates write it out themselves as an object."""
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return dict(call)
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return dict(call)  # a model's malformed call stays in the history as it was written
    if not isinstance(arguments, dict):
        return dict(call)
    return {**call, "function": {**function, "arguments": arguments}}


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Reasoning under each name that templates read: ``reasoning_content`` and ``thinking``."""
    if _REASONING_NAMES.isdisjoint(message):
        return message
    reasoning = next((message[key] for key in _REASONING_FIELDS if key in message), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _checked_kwargs(kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    reserved = [name for name in RESERVED_KWARGS if name in kwargs]
    if reserved:
        where = f"chat_template_kwargs.{reserved[0]}"
        raise RequestError(f"{where} may not be set; it is not the template's own", param=where)
    return kwargs


class _TransparentGeneration(jinja2.ext.Extension):
    """``{% generation %}`` marks what an assistant wrote, for training; here its body is plain."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as a class attribute

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class _Namespace(jinja2.utils.Namespace):
    """Without underscored names: the sandbox checks reads of attributes, not a namespace's writes.

    ``__init__`` has no named parameter so that ``namespace(self=1)`` works, as in jinja2.
    """

    def __init__(*args: Any, **kwargs: Any) -> None:
        for name in dict(*args[1:], **kwargs):
            _refuse_underscore(name)
        jinja2.utils.Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace may not hold the name {name!r}")


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON for a prompt: jinja2's own filter would escape HTML and all but ASCII."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[jinja2.ext.loopcontrols, _TransparentGeneration],
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=_Namespace
    )
    return environment


def _compile(environment: jinja2.Environment, name: str, text: str) -> jinja2.Template:
    try:
        return environment.from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"the chat template {name!r} is not valid (line {error.lineno}: {error.message}); "
            "give another one with --chat-template"
        ) from error
