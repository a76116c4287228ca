"""Values of a request body that stand for themselves: types are known, now they must be in range.

Each function takes a value as it came and returns it resolved, or raises a RequestError that names
its parameter. Knows single parameters; nothing of what a whole request is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Annotated, Any, Final

import msgspec

from trserve.errors import RequestError
from trserve.gateway.request_body import MAX_NAME, Body, ChatBody, type_error
from trserve.ipc.layout import MAX_TOPS
from trserve.params import SamplingDefaults

MAX_PROMPTS = 4096
MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 256
MAX_BIAS = 100.0
MAX_TIMEOUT_S = 86_400.0
MAX_NAME_CHARS = 1024
"""Characters of a name that is kept with a request and sent back with its answer."""

REPETITION_PENALTIES = 0.01, 100.0
"""Between these a logit times the penalty is finite in float32."""

_MAX_ID_DIGITS = 10
_INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
_FLOAT32_MAX = 3.4028234663852886e38
_FLOAT32_TINY = 2.0**-126


def flag(value: bool | None, *, default: bool = False) -> bool:
    """``value``, or the default where there is none."""
    return default if value is None else value


def integer(name: str, value: float | None, low: int, high: int) -> int | None:
    """``value`` if it is whole and lies in [low, high]; None where there is none."""
    if value is None:
        return None
    if isinstance(value, float) and not value.is_integer():
        raise RequestError(f"{name} must be a whole number", param=name)
    if not low <= value <= high:
        raise RequestError(f"{name} must be between {low} and {high}", param=name)
    return int(value)


def real(
    name: str, value: float | None, low: float, high: float, *, default: float, above: bool = False
) -> float:
    """``value`` if it lies in [low, high], with ``above`` in (low, high]."""
    if value is None:
        return default
    if not low <= value <= high or (above and value == low):
        lower = f"greater than {low:g}" if above else f"at least {low:g}"
        raise RequestError(f"{name} must be {lower} and at most {high:g}", param=name)
    return float(value)


def check_name(name: str, value: str | None) -> None:
    """RequestError if the name ``value`` is too long to be kept and repeated."""
    if value is not None and len(value) > MAX_NAME_CHARS:
        raise RequestError(f"{name} may have at most {MAX_NAME_CHARS} characters", param=name)


def checked_name(name: str, value: str) -> str:
    """``value``; raises as :func:`check_name`."""
    check_name(name, value)
    return value


def time_limit(name: str, value: float | None) -> float | None:
    """``value`` seconds, more than 0 and at most a day; None where there is none."""
    if value is None:
        return None
    return real(name, value, 0.0, MAX_TIMEOUT_S, default=MAX_TIMEOUT_S, above=True)


def _stop(stop: str | list[str]) -> list[str]:
    stops = [stop] if isinstance(stop, str) else stop
    if len(stops) > MAX_STOPS:
        raise RequestError(f"stop may hold at most {MAX_STOPS} strings", param="stop")
    for text in stops:
        if not text:
            raise RequestError("stop may not hold an empty string; leave it out", param="stop")
        if len(text) > MAX_STOP_CHARS:
            raise RequestError(
                f"a stop string may have at most {MAX_STOP_CHARS} characters", param="stop"
            )
    return stops


def _stop_token_ids(ids: list[int | float]) -> list[int]:
    if len(ids) > MAX_STOP_TOKEN_IDS:
        raise RequestError(
            f"stop_token_ids may hold at most {MAX_STOP_TOKEN_IDS} ids", param="stop_token_ids"
        )
    checked = [integer(f"stop_token_ids[{i}]", value, 0, _INT32_MAX) for i, value in enumerate(ids)]
    return [value for value in checked if value is not None]


Read = Callable[[str, Any], Any]
"""From a member's name and its value to what it stands for."""


class Readers:
    """How some members of a body are read; two at least.

    Most of them are left out in most requests, for which nothing is called.
    """

    def __init__(self, table: Mapping[str, Read]) -> None:
        self._table = tuple(table.items())
        self._values = attrgetter(*table)

    def given(self, fields: msgspec.Struct) -> dict[str, Any]:
        """What the members stand for that are there, by their names."""
        return {
            name: read(name, value)
            for (name, read), value in zip(self._table, self._values(fields), strict=True)
            if value is not None
        }


def as_it_is(name: str, value: Any) -> Any:
    """``value``, of which every one of its type will do."""
    return value


def _real_in(low: float, high: float) -> Read:
    return lambda name, value: real(name, value, low, high, default=low)


def _top_p(name: str, value: float) -> float:
    # Workers compute in float32, where a smaller top_p would round to 0 and a larger temperature
    # to infinity; both mean the same at these limits.
    return max(real(name, value, 0.0, 1.0, default=1.0, above=True), _FLOAT32_TINY)


def _top_k(name: str, value: float) -> int:
    return max(integer(name, value, -1, INT64_MAX) or 0, 0)


def sampling(fields: Body, defaults: SamplingDefaults) -> dict[str, Any]:
    """How tokens are chosen and an answer ends, by the names of ``GenerationRequest``; without
    what the body leaves out and has its default there."""
    found = {
        "temperature": defaults.temperature,
        "top_p": max(defaults.top_p, _FLOAT32_TINY),
        "top_k": defaults.top_k,
        "min_p": defaults.min_p,
        "repetition_penalty": defaults.repetition_penalty,
    }
    found.update(_SAMPLING.given(fields))
    if fields.no_stop_trim:
        found["include_stop_str_in_output"] = True
    return found


def _logit_bias(given: dict[str, Any]) -> dict[int, float]:
    """Biases by token id; JSON has the ids as strings."""
    if len(given) > MAX_LOGIT_BIAS:
        raise RequestError(
            f"logit_bias may hold at most {MAX_LOGIT_BIAS} tokens", param="logit_bias"
        )
    biases: dict[int, float] = {}
    for key, value in given.items():
        where = f"logit_bias.{key[:MAX_NAME]}"
        if not (key.isascii() and key.isdigit() and len(key) <= _MAX_ID_DIGITS):
            raise RequestError(f"{where}: the members of logit_bias are token ids", param=where)
        if type(value) not in (int, float) or not -MAX_BIAS <= value <= MAX_BIAS:
            raise RequestError(
                f"{where} must be a number between {-MAX_BIAS:g} and {MAX_BIAS:g}", param=where
            )
        biases[int(key)] = float(value)
    return biases


_SAMPLING: Final = Readers(
    {
        "top_k": _top_k,
        "min_tokens": lambda name, value: integer(name, value, 0, INT64_MAX),
        "top_p": _top_p,
        "temperature": _real_in(0.0, _FLOAT32_MAX),
        "min_p": _real_in(0.0, 1.0),
        "repetition_penalty": _real_in(*REPETITION_PENALTIES),
        "presence_penalty": _real_in(-2.0, 2.0),
        "frequency_penalty": _real_in(-2.0, 2.0),
        "logit_bias": lambda _, value: _logit_bias(value),
        "seed": lambda name, value: integer(name, value, -INT64_MAX - 1, INT64_MAX),
        "ignore_eos": as_it_is,
        "stop": lambda _, value: _stop(value),
        "stop_token_ids": lambda _, value: _stop_token_ids(value),
        "include_stop_str_in_output": as_it_is,
        "skip_special_tokens": as_it_is,
    }
)

_TokenId = Annotated[int, msgspec.Meta(ge=0, le=_INT32_MAX)]


def prompts(value: Any, name: str) -> list[str | list[int]]:
    """All prompts, text or ids: a string, a list of ids, or a list of either of these."""
    if not (isinstance(value, list) and value and isinstance(value[0], str | list)):
        return [_prompt(value, name)]
    if len(value) > MAX_PROMPTS:
        raise RequestError(f"{name} may hold at most {MAX_PROMPTS} prompts", param=name)
    return [_prompt(each, f"{name}[{i}]") for i, each in enumerate(value)]


def _prompt(value: Any, where: str) -> str | list[int]:
    if value is None or value == "" or value == []:
        raise RequestError(f"{where} is empty; send text or token ids", param=where)
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise RequestError(f"{where} must be a string or a list of token ids", param=where)
    try:
        return msgspec.convert(value, list[_TokenId])
    except msgspec.ValidationError as error:
        raise type_error(error, where) from error


def check_best_of(fields: Body, n: int) -> None:
    """``best_of`` may repeat ``n`` or be 1, because nothing is chosen among more."""
    if (integer("best_of", fields.best_of, 1, INT64_MAX) or 1) not in (1, n):
        raise RequestError(
            f"best_of must be n, which is {n}: choosing among more is not supported yet",
            param="best_of",
        )


def top_logprobs(name: str, value: float | None) -> int | None:
    """How many of the most probable tokens are wanted with each; None for no logprobs."""
    return integer(name, value, 0, MAX_TOPS)


def chat_logprobs(fields: ChatBody) -> int | None:
    """``logprobs`` says whether, ``top_logprobs`` how many."""
    if fields.logprobs is None and fields.top_logprobs is None:
        return None
    tops = top_logprobs("top_logprobs", fields.top_logprobs)
    if fields.logprobs:
        return tops or 0
    if tops:
        raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    return None


def tools(fields: ChatBody) -> list[dict[str, Any]]:
    """The tools that the model may call; none with ``tool_choice: none``."""
    if fields.tool_choice == "none":
        return []
    for index, tool in enumerate(fields.tools or []):
        where = f"tools[{index}]"
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise RequestError(f'{where} must be an object of type "function"', param=where)
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            where += ".function"
            raise RequestError(f"{where} must be an object with a name", param=where)
        if not isinstance(function.get("parameters") or {}, dict):
            where += ".function.parameters"
            raise RequestError(f"{where} must be an object: a JSON schema", param=where)
    return fields.tools or []


def called_tools(fields: ChatBody) -> list[str]:
    """Names of the tools of which one must be called; empty where the model may choose not to.

    The tools themselves have been checked.
    """
    choice = fields.tool_choice
    if choice in (None, "auto", "none"):
        return []
    if choice != "required" and not isinstance(choice, dict):
        raise RequestError(
            'tool_choice must be "auto", "none", "required" or an object that names a function',
            param="tool_choice",
        )
    names = [tool["function"]["name"] for tool in fields.tools or []]
    if not names:
        raise RequestError("tool_choice needs tools; send some", param="tool_choice")
    if choice == "required":
        return names
    function = choice.get("function")
    named = function.get("name") if isinstance(function, dict) else None
    if choice.get("type") != "function" or not isinstance(named, str) or named not in names:
        raise RequestError(
            'tool_choice must be {"type": "function", "function": {"name": NAME}} with the name of '
            "one of the tools",
            param="tool_choice",
        )
    return [named]
