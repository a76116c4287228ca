"""What bytes a token stands for, where that does not depend on its neighbours.

Reads a decoder as ``tokenizer.json`` states it. Knows no vocabulary, no streams and no files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class ByteRules:
    """How a decoder turns one token into bytes, for decoders that treat each token by itself."""

    def __init__(
        self,
        *,
        byte_level: bool = False,
        replacements: Sequence[tuple[str, str]] = (),
        leading_strip: int = 0,
    ) -> None:
        self.byte_level = byte_level
        self.replacements = tuple(replacements)
        self.leading_strip = leading_strip

    @classmethod
    def of(cls, decoder: Mapping[str, Any]) -> ByteRules | None:
        """The rules of a decoder as ``tokenizer.json`` states it, or None if context matters.

        Two forms are such: ByteLevel (GPT-2, Qwen, Llama 3), and replacements, then ByteFallback,
        then Fuse and perhaps a Strip of the text's first spaces (Llama 2, Mistral, Gemma).
        """
        steps = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
        kinds = [step.get("type") for step in steps]
        if kinds == ["ByteLevel"]:
            return cls(byte_level=True)
        if "ByteFallback" not in kinds:
            return None
        first = kinds.index("ByteFallback")
        replacements = [_replacement(step) for step in steps[:first]]
        leading_strip = _fused_strip(steps[first + 1 :])
        if leading_strip is None or None in replacements:
            return None
        return cls(
            replacements=[pair for pair in replacements if pair is not None],
            leading_strip=leading_strip,
        )

    def piece(self, token: str, *, added: bool) -> bytes:
        """Bytes of ``token``; an added token may be plain text that only looks encoded."""
        if self.byte_level:
            return _byte_level(token, added=added)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                return token.encode()
        if not added:
            for old, new in self.replacements:
                token = token.replace(old, new)
        return token.encode()


def _byte_level(token: str, *, added: bool) -> bytes:
    """The library's rule: map every character, or, where one is no byte's, take the text as it is.

    An added token whose mapped bytes are not UTF-8 (an accented letter looks like a byte) is text.
    """
    try:
        mapped = bytes([_BYTE_OF_CHAR[char] for char in token])
    except KeyError:
        return token.encode()
    if added and isinstance(text_if_whole(mapped), bytes):
        return token.encode()
    return mapped


def _byte_of_char() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()


def _replacement(step: Mapping[str, Any]) -> tuple[str, str] | None:
    pattern = step.get("pattern")
    if step.get("type") != "Replace" or not isinstance(pattern, Mapping) or "String" not in pattern:
        return None
    return pattern["String"], step["content"]


def _fused_strip(steps: Sequence[Mapping[str, Any]]) -> int | None:
    """Spaces stripped after Fuse; None if the steps are anything else than Fuse and that Strip."""
    match [dict(step) for step in steps]:
        case [] | [{"type": "Fuse"}]:
            return 0
        case [{"type": "Fuse"}, {"type": "Strip", "content": " ", "start": int(start), "stop": 0}]:
            return start
        case _:
            return None


def text_if_whole(piece: bytes) -> str | bytes:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return piece


def strip_leading(text: str, limit: int) -> str:
    """``text`` without at most ``limit`` of its leading spaces."""
    while limit > 0 and text.startswith(" "):
        text, limit = text[1:], limit - 1
    return text
