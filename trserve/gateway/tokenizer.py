"""The tokenizer of a checkpoint directory: text to ids, and ids to bytes.

A thin layer over the ``tokenizers`` library. Knows nothing of requests, streams or models; chat
templates are rendered by ``chat_template``, streams are decoded by ``detokenizer``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import tokenizers

from trserve.errors import ModelUnavailableError, RequestError
from trserve.gateway.chat_template import ChatTemplate
from trserve.gateway.token_bytes import ByteRules, strip_leading, text_if_whole
from trserve.models.gguf_tokenizer import read_gguf_tokenizer

_NAMED_SPECIALS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class Tokenizer:
    """One checkpoint's tokenizer; immutable, safe to share between threads.

    Attributes:
        size: the largest id + 1, added tokens included.
        bos_token_id: id of the tokenizer's own BOS, or None (a model's ``config.json`` often names
            one that its tokenizer never writes).
        eos_token_ids: every id that ends a turn: the tokenizer's, and those of ``config.json`` and
            ``generation_config.json``, the tokenizer's first.
        added_ids: ids of the tokens beside the vocabulary that texts are made of.
        special_ids: ids whose text is left out with ``skip_special_tokens``.
        has_chat_template: whether :meth:`render_chat` can work at all.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        named: Mapping[str, str] | None = None,
        eos_token_ids: Iterable[int] = (),
        chat_template: ChatTemplate | None = None,
    ) -> None:
        named = named or {}
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._chat_template = chat_template
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self._tokens: list[str | None] = [None] * (max(vocabulary.values(), default=-1) + 1)
        for token, token_id in vocabulary.items():
            self._tokens[token_id] = token
        added = backend.get_added_tokens_decoder()
        self.added_ids: frozenset[int] = frozenset(added)
        self.size = len(self._tokens)
        self.special_ids: frozenset[int] = frozenset(i for i, t in added.items() if t.special)
        self.bos_token_id: int | None = vocabulary.get(named.get("bos_token", ""))
        own_eos = vocabulary.get(named.get("eos_token", ""))
        ids = ([] if own_eos is None else [own_eos]) + sorted(eos_token_ids)
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys(ids))

    @classmethod
    def load(cls, path: Path, *, chat_template: str | None = None) -> Tokenizer:
        """Reads ``tokenizer.json`` and what stands beside it in the directory ``path``.

        Args:
            path: a checkpoint directory, or a GGUF file with a tokenizer in it.
            chat_template: template text that replaces the checkpoint's own.

        Raises:
            ModelUnavailableError: there is no ``tokenizer.json``, or a file is malformed.
            ConfigError: a chat template does not compile.
        """
        if path.suffix == ".gguf":
            return cls._from_gguf(path, chat_template)
        backend = _read_backend(path / "tokenizer.json")
        config = _read_json(path / "tokenizer_config.json")
        named, further = _special_tokens(
            {**_read_json(path / "special_tokens_map.json"), **config},
            path / "tokenizer_config.json",
        )
        _mark_special(backend, [*named.values(), *further])
        source = chat_template or _template_source(path, config)
        return cls(
            backend,
            named=named,
            eos_token_ids=_configured_eos(path),
            chat_template=ChatTemplate(source, named) if source else None,
        )

    @classmethod
    def _from_gguf(cls, path: Path, chat_template: str | None) -> Tokenizer:
        found = read_gguf_tokenizer(path)
        source = chat_template or found.chat_template
        return cls(
            found.backend,
            named=found.named,
            eos_token_ids=found.eos_token_ids,
            chat_template=ChatTemplate(source, found.named) if source else None,
        )

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    @property
    def takes_tools(self) -> bool:
        """Whether the chat template shows tools to the model."""
        return self._chat_template is not None and self._chat_template.takes_tools

    @property
    def has_reasoning(self) -> bool:
        """Whether the chat template knows of a model's reasoning."""
        return self._chat_template is not None and self._chat_template.has_reasoning

    @property
    def has_elements(self) -> bool:
        """Whether the chat template shows parameters of tools as elements, and not as JSON."""
        return self._chat_template is not None and self._chat_template.has_elements

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of ``text``; with ``add_special_tokens``, also those that the model wants around it.

        The file's post-processor alone says which: ``add_bos_token`` of the configuration counts
        for nothing beside it, as in transformers 5. Takes about 0.2 us a character without the
        interpreter lock, so a long text belongs on another thread than the event loop's.

        Raises:
            RequestError: the vocabulary has no way to write ``text`` (no unknown token).
        """
        try:
            # The batch form releases the interpreter lock and computes no offsets, unlike `encode`.
            (encoding,) = self._backend.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
        except Exception as error:  # the library raises bare Exception for all of its errors
            raise RequestError(f"the tokenizer cannot encode this text: {error}") from error
        ids: list[int] = encoding.ids
        return ids

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Prompt text of a chat, to be encoded *without* special tokens: the template writes them.

        Raises:
            RequestError: there is no template, or it refuses the messages.
        """
        if self._chat_template is None:
            raise RequestError(
                "the model has no chat template; send a prompt to /v1/completions, or start the "
                "server with --chat-template",
                param="messages",
            )
        return self._chat_template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            kwargs=kwargs,
        )

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool) -> str:
        """Text of ``ids`` as a text of its own; ids outside of the vocabulary have none.

        Invalid UTF-8 becomes U+FFFD. ``clean_up_tokenization_spaces`` is not applied: it deletes
        spaces that a model wrote.
        """
        skip = self.special_ids if skip_special_tokens else frozenset()
        shown = [i for i in ids if i not in skip]
        table = self.token_bytes()
        if table is None:
            text: str = self._backend.decode(shown, skip_special_tokens=False)
            return text
        size = self.size
        joined = b"".join([table[i] for i in shown if 0 <= i < size]).decode("utf-8", "replace")
        return strip_leading(joined, self.leading_strip)

    def token_bytes(self) -> list[bytes] | None:
        """Bytes of each id, so that a text's bytes are those of its ids, joined.

        None where a token's text depends on its neighbours. The list is shared: do not change it.
        """
        return self._token_bytes

    @cached_property
    def token_texts(self) -> list[str | bytes] | None:
        """As :meth:`token_bytes`, with a ``str`` for each token that is whole UTF-8 by itself."""
        table = self._token_bytes
        return None if table is None else [text_if_whole(piece) for piece in table]

    @property
    def pieces(self) -> list[bytes | None] | None:
        """As :meth:`token_bytes`, with None where there is no token."""
        table = self._token_bytes
        if table is None:
            return None
        return [None if t is None else b for t, b in zip(self._tokens, table, strict=True)]

    @property
    def leading_strip(self) -> int:
        """Spaces that decoding drops from the start of a text (SentencePiece adds one there)."""
        return self._rules.leading_strip if self._rules is not None else 0

    def fingerprint(self) -> str:
        """Hex digest that two tokenizers share if and only if their ids mean the same text.

        Taken over (id, bytes); over (id, token) and the decoder where there are no bytes.
        """
        table = self._token_bytes
        content: list[Any] = (
            [self._tokens, self._decoder] if table is None else [piece.hex() for piece in table]
        )
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @cached_property
    def _decoder(self) -> dict[str, Any]:
        decoder = self._backend.decoder
        state: dict[str, Any] = json.loads(decoder.__getstate__()) if decoder is not None else {}
        return state

    @cached_property
    def _rules(self) -> ByteRules | None:
        return ByteRules.of(self._decoder)

    @cached_property
    def _token_bytes(self) -> list[bytes] | None:
        rules = self._rules
        if rules is None:
            return None
        return [
            b"" if token is None else rules.piece(token, added=i in self.added_ids)
            for i, token in enumerate(self._tokens)
        ]


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise ModelUnavailableError(
            f"{path} does not exist; give --models a checkpoint directory that has a tokenizer.json"
        )
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for all of its errors
        raise ModelUnavailableError(f"{path} is not a readable tokenizer: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    """The object in ``path``; empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelUnavailableError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelUnavailableError(f"{path} must hold a JSON object")
    return content


def _token_text(value: Any) -> str | None:
    """A token in a configuration is its text, or an object with the text as ``content``."""
    content = value.get("content") if isinstance(value, Mapping) else value
    return content if isinstance(content, str) else None


def _special_tokens(config: Mapping[str, Any], source: Path) -> tuple[dict[str, str], list[str]]:
    """The special tokens that have a name (``bos_token``, ...), and the further ones."""
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    candidates = {name: config.get(name) for name in _NAMED_SPECIALS}
    if isinstance(extra, Mapping):
        candidates.update(extra)
        extra = []
    if not isinstance(extra, list):
        raise ModelUnavailableError(
            f"{source}: extra_special_tokens or additional_special_tokens should be a list, and is "
            f"{extra!r}"
        )
    named = {name: text for name, value in candidates.items() if (text := _token_text(value))}
    return named, [text for value in extra if (text := _token_text(value))]


def _mark_special(backend: tokenizers.Tokenizer, texts: Iterable[str]) -> None:
    """Makes the tokens special that a configuration calls so; ids are never added, only marked."""
    backend.add_special_tokens([text for text in texts if backend.token_to_id(text) is not None])


def _configured_eos(path: Path) -> set[int]:
    """Token ids that the model's own files call the end, one or several in each."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        value = _read_json(path / name).get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        found.update(i for i in ids if type(i) is int and i >= 0)
    return found


def _template_source(path: Path, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    """The template texts: files win over ``tokenizer_config.json``, as in ``transformers``."""
    files = {"default": path / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted(path.glob("additional_chat_templates/*.jinja"))}
    texts = {name: _read_text(file) for name, file in files.items() if file.is_file()}
    return texts or _inline_template(path / "tokenizer_config.json", config.get("chat_template"))


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except ValueError as error:
        raise ModelUnavailableError(f"{file} is not UTF-8 text: {error}") from None


def _inline_template(source: Path, inline: Any) -> str | dict[str, str] | None:
    """``chat_template`` of the configuration ``source``: a text, or texts with their names."""
    if not inline or isinstance(inline, str):
        return inline or None
    pairs: list[tuple[Any, Any]] = [(None, None)]
    if isinstance(inline, dict):
        pairs = list(inline.items())
    elif isinstance(inline, list) and all(isinstance(entry, dict) for entry in inline):
        pairs = [(entry.get("name"), entry.get("template")) for entry in inline]
    if not all(isinstance(part, str) for part in chain(*pairs)):
        raise ModelUnavailableError(
            f"{source}: chat_template should be a text, or a list of objects with a name and a "
            "template, both texts"
        )
    return dict(pairs)
