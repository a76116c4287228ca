"""The tokenizer inside a GGUF file: byte-level BPE, its special tokens and its chat template.

Knows the file's ``tokenizer.*`` keys and, by name, how each family splits text before merging;
nothing of requests or streams. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from trserve.errors import ModelUnavailableError
from trserve.models.gguf_file import GgufFile
from trserve.models.gguf_spec import end_ids

_CONTROL: Final = 3
_USER_DEFINED: Final = 4
_UNUSED: Final = 5
"""Token types; a token that is not used has no text."""

_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS_AND_SPACES: Final = (
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"  # punctuation
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class _Family:
    """How a family's text is split: ``split`` is a regular expression, None the one of GPT-2.

    With ``whole_words`` a word that is a token is that token, whatever the merges say.
    ``adds_bos`` holds where the file does not say.
    """

    split: str | None = None
    single_digits: bool = False
    composed: bool = False
    whole_words: bool = False
    adds_bos: bool = False


def _pattern(numbers: str) -> str:
    return _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|" + numbers + _WORDS_AND_SPACES


_QWEN2: Final = _Family(_pattern(r"\p{N}"), composed=True)
_LLAMA3: Final = _Family(_pattern(r"\p{N}{1,3}"), whole_words=True, adds_bos=True)

FAMILIES: Final[Mapping[str, _Family]] = {
    "gpt-2": _Family(),
    "smollm": _Family(single_digits=True),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
}
"""By the name in ``tokenizer.ggml.pre``."""


@dataclass(frozen=True)
class GgufTokenizer:
    """What ``trserve.gateway.tokenizer.Tokenizer`` is made of.

    Attributes:
        backend: the tokenizer itself.
        named: texts of the special tokens that have a name (``bos_token``, ...).
        eos_token_ids: every id that ends a turn.
        chat_template: template text, texts by name, or None.
    """

    backend: tokenizers.Tokenizer
    named: Mapping[str, str]
    eos_token_ids: tuple[int, ...]
    chat_template: str | Mapping[str, str] | None


def tokenizer_from_gguf(path: Path) -> tokenizers.Tokenizer:
    """The tokenizer alone: see :func:`read_gguf_tokenizer`."""
    return read_gguf_tokenizer(path).backend


def read_gguf_tokenizer(path: Path) -> GgufTokenizer:
    """The tokenizer in the GGUF file ``path``.

    Raises:
        ModelUnavailableError: there is none, or it is of a kind that is not supported; a
            ``tokenizer.json`` beside the file is used instead.
    """
    prefix = "tokenizer.ggml."
    metadata = GgufFile(path).metadata
    keys = {k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}
    family = _family(keys, path)
    try:
        named = _named(keys)
        backend = _backend(keys, family, named)
    except KeyError as missing:
        raise ModelUnavailableError(f"{path} has no usable tokenizer: it lacks {missing}") from None
    except Exception as error:  # the tokenizers library raises bare Exception for all errors
        raise ModelUnavailableError(f"{path} has no usable tokenizer: {error}") from error
    return GgufTokenizer(backend, named, end_ids(metadata), _chat_template(metadata))


def _family(keys: Mapping[str, Any], path: Path) -> _Family:
    model, name = str(keys.get("model")), str(keys.get("pre"))
    if model != "gpt2":
        raise ModelUnavailableError(
            f"{path} has a tokenizer of the kind {model!r}; only byte-level BPE ('gpt2') is read "
            "from GGUF files: put the model's tokenizer.json beside it"
        )
    if name not in FAMILIES:
        raise ModelUnavailableError(
            f"{path} splits text as {name!r}, which is not known; known are {', '.join(FAMILIES)}: "
            "put the model's tokenizer.json beside it"
        )
    return FAMILIES[name]


def _named(keys: Mapping[str, Any]) -> dict[str, str]:
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    ids = {f"{short}_token": keys.get(f"{name}_token_id") for name, short in names.items()}
    tokens = keys["tokens"]
    return {name: tokens[index] for name, index in ids.items() if index is not None}


def _backend(
    keys: Mapping[str, Any], family: _Family, named: Mapping[str, str]
) -> tokenizers.Tokenizer:
    tokens = keys["tokens"]
    types = keys.get("token_type") or [1] * len(tokens)
    typed = list(zip(tokens, types, strict=True))
    vocabulary = {token: i for i, (token, kind) in enumerate(typed) if kind != _UNUSED}
    merges = [_pair(merge) for merge in keys["merges"]]
    model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=family.whole_words)
    backend = tokenizers.Tokenizer(model)
    if family.composed:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _pre_tokenizer(family)
    backend.decoder = decoders.ByteLevel()
    added = [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in typed
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    backend.add_special_tokens([token for token in added if token.special])
    backend.add_tokens([token for token in added if not token.special])
    backend.post_processor = _post_processor(keys, family, named)
    return backend


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _pre_tokenizer(family: _Family) -> pre_tokenizers.PreTokenizer:
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=family.split is None)
    if family.split is not None:
        words = pre_tokenizers.Split(Regex(family.split), behavior="isolated")
        return pre_tokenizers.Sequence([words, bytes_only])
    if family.single_digits:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), bytes_only])
    return bytes_only


def _post_processor(
    keys: Mapping[str, Any], family: _Family, named: Mapping[str, str]
) -> processors.PostProcessor:
    """Writes the ids that the model wants around every text."""
    before = ["bos_token"] if keys.get("add_bos_token", family.adds_bos) else []
    after = ["eos_token"] if keys.get("add_eos_token", False) else []
    ids = {named[name]: int(keys[f"{name}_id"]) for name in before + after}
    single = [*(named[name] for name in before), "$A", *(named[name] for name in after)]
    return processors.TemplateProcessing(
        single=single, pair=[*single, "$B:1"], special_tokens=list(ids.items())
    )


def _chat_template(metadata: Mapping[str, Any]) -> str | Mapping[str, str] | None:
    """The template, or the default one and those that have a name."""
    default = metadata.get("tokenizer.chat_template")
    named = {
        name: str(metadata[f"tokenizer.chat_template.{name}"])
        for name in metadata.get("tokenizer.chat_templates", ())
        if f"tokenizer.chat_template.{name}" in metadata
    }
    if named and default is not None:
        named["default"] = str(default)
    return named or default
