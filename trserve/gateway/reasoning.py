"""What a think-style model writes between ``<think>`` and ``</think>``, told from its answer.

Line breaks and spaces around the reasoning belong to the format and are left out, in a stream as
in a whole. Knows no tools and no JSON.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from trserve.gateway.markers import cut

BEGIN: Final = "<think>"
END: Final = "</think>"


Reasons = Literal["never", "maybe", "already"]
"""Whether an answer begins with reasoning; ``already``: amid some."""


class Piece(NamedTuple):
    """Some text, of the reasoning or of the answer."""

    text: str
    is_reasoning: bool


def may_reason(prompt: str) -> bool:
    """Whether reasoning can follow ``prompt``: some templates close it before the model begins."""
    return not prompt.rstrip().endswith(END)


def _ends_within(continued: str) -> bool:
    """Whether an assistant's text ends amid its reasoning, of which some stands there."""
    text = continued.lstrip()
    begins = text.startswith(BEGIN) and not text.removeprefix(BEGIN).isspace()
    return begins and text != BEGIN and END not in text


def begins_within(prompt: str, continued: str) -> bool:
    """Whether an answer to ``prompt``, after the assistant's own ``continued``, is reasoning."""
    return _ends_within(continued) or prompt.rstrip().endswith(BEGIN)


class ReasoningSplitter:
    """Splits the text of one answer.

    Args:
        prompt: what it answers; some templates open the reasoning themselves.
        continued: the assistant's own text that it goes on with, if it does.
    """

    def __init__(self, prompt: str, *, continued: str = "") -> None:
        self._held = ""
        # Of reasoning that goes on, the space before its next word is a part.
        self._begun = _ends_within(continued)
        is_open = begins_within(prompt, continued)
        self._push = self._reasoning if is_open else self._beginning

    def push(self, text: str) -> list[Piece]:
        """The pieces that ``text`` makes certain."""
        return [piece for piece in self._push(text) if piece.text]

    def flush(self) -> list[Piece]:
        """What was held back, at the end."""
        held, self._held = self._held, ""
        is_reasoning = self._push == self._reasoning
        return [Piece(held, is_reasoning)] if held and not (is_reasoning and held.isspace()) else []

    def _beginning(self, text: str) -> list[Piece]:
        """Nothing but space so far: the marker may still come."""
        self._held += text
        start = self._held.lstrip()
        if not start or (len(start) < len(BEGIN) and BEGIN.startswith(start)):
            return []
        held, self._held = self._held, ""
        if not start.startswith(BEGIN):
            self._push = self._answer
            return [Piece(held, False)]
        self._push = self._reasoning
        return self._reasoning(start.removeprefix(BEGIN))

    def _reasoning(self, text: str) -> list[Piece]:
        found = cut(self._held + text, END)
        before = found.before if self._begun else found.before.lstrip()
        shown = before.rstrip()
        self._begun |= bool(shown)
        if not found.found:
            self._held = before[len(shown) :] + found.after
            return [Piece(shown, True)]
        self._held = ""
        self._push = self._before_answer
        return [Piece(shown, True), *self._before_answer(found.after)]

    def _before_answer(self, text: str) -> list[Piece]:
        """The space between reasoning and answer."""
        text = text.lstrip()
        if text:
            self._push = self._answer
        return [Piece(text, False)]

    def _answer(self, text: str) -> list[Piece]:
        return [Piece(text, False)]
