"""An assistant's text as the parts of its message: reasoning, content, calls of tools.

Only for the answers that may have such parts; every other stream goes without. Knows the shapes
of OpenAI's messages; nothing of sockets.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from trserve.gateway.reasoning import ReasoningSplitter, Reasons, begins_within, may_reason
from trserve.gateway.requests import GenerationRequest
from trserve.gateway.tool_calls import Call, ToolCallSplitter


class PartSplitter:
    """Makes the deltas of one answer's message.

    Args:
        reasoning: tells reasoning from the rest, if there may be any.
        tools: tells calls from text, if any may be called.
        show_reasoning: whether the client wants to see it.
    """

    def __init__(
        self,
        reasoning: ReasoningSplitter | None,
        tools: ToolCallSplitter | None,
        *,
        show_reasoning: bool = True,
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._show_reasoning = show_reasoning
        self._calls = 0

    @property
    def calls_tools(self) -> bool:
        """Whether a call was shown."""
        return self._calls > 0

    def push(self, text: str, *, last: bool) -> list[dict[str, Any]]:
        """The deltas that ``text`` makes certain; all that are left with the ``last``."""
        if self._reasoning is None:
            return self._deltas(text, last=last)
        deltas = []
        pieces = self._reasoning.push(text)
        if last:
            pieces += self._reasoning.flush()
        for piece in pieces:
            if not piece.is_reasoning:
                deltas += self._deltas(piece.text, last=False)
            elif self._show_reasoning:
                deltas.append({"reasoning_content": piece.text})
        return deltas + self._deltas("", last=True) if last else deltas

    def _deltas(self, text: str, *, last: bool) -> list[dict[str, Any]]:
        if self._tools is None:
            return [{"content": text}] if text else []
        found = self._tools.push(text)
        if last:
            found += self._tools.flush()
        return [self._call(each) if isinstance(each, Call) else {"content": each} for each in found]

    def _call(self, call: Call) -> dict[str, Any]:
        entry = {
            "index": self._calls,
            "id": f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        self._calls += 1
        return {"tool_calls": [entry]}


def whole_message(deltas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The message that a stream of ``deltas`` adds up to."""
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    content = "".join(delta.get("content", "") for delta in deltas)
    reasoning = "".join(delta.get("reasoning_content", "") for delta in deltas)
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if calls:
        message["content"] = content or None
        message["tool_calls"] = [
            {key: value for key, value in call.items() if key != "index"} for call in calls
        ]
    if reasoning:
        message["reasoning_content"] = reasoning
    return message


def _continued(request: GenerationRequest) -> str:
    """The assistant's own text that the answer goes on with; empty if it begins a message."""
    if not (request.continue_final_message and request.messages):
        return ""
    content: str = request.messages[-1].get("content", "")
    return content


def reasons_first(request: GenerationRequest, prompt: str, *, reasons: bool) -> Reasons:
    """Whether reasoning, which :func:`part_splitter` tells apart, comes before the answer."""
    if not (reasons and may_reason(prompt)):
        return "never"
    return "already" if begins_within(prompt, _continued(request)) else "maybe"


def part_splitter(request: GenerationRequest, prompt: str, *, reasons: bool) -> PartSplitter | None:
    """What an answer to ``prompt`` needs; None if it has no part but content.

    ``reasons``: whether the model may reason at all.
    """
    reasoning = None
    if reasons and may_reason(prompt):
        reasoning = ReasoningSplitter(prompt, continued=_continued(request))
    tools = None
    if request.tools:
        tools = ToolCallSplitter(
            request.tools, parallel=request.parallel_tool_calls, follows=request.constrained
        )
    if reasoning is None and tools is None:
        return None
    return PartSplitter(reasoning, tools, show_reasoning=request.reasoning == "apart")
