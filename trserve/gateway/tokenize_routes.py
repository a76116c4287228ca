"""/tokenize and /detokenize, with the names of vLLM and SGLang. Knows no models and no slots."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Final

import msgspec
import orjson

from trserve.errors import RequestError
from trserve.gateway import long_work
from trserve.gateway.chat_template import normalize_messages
from trserve.gateway.replies import Handler, Receive, Scope, Send, send_json
from trserve.gateway.request_body import decode
from trserve.gateway.request_values import flag
from trserve.gateway.service import Service

Read = Callable[[Scope, Receive], Awaitable[bytes]]
MAX_TEXTS: Final = 4096
MAX_CHARS: Final = 2**20
"""To encode a text takes some 200 bytes a character at once."""

MAX_IDS: Final = 2**20
_Id = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class TokenizeBody(msgspec.Struct, kw_only=True):
    """A text, several, or a chat."""

    model: str | None = None
    prompt: str | list[str] | None = None
    text: str | list[str] | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Any] | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """Ids of one text, or of several."""

    model: str | None = None
    tokens: list[_Id | list[_Id]] | None = None
    skip_special_tokens: bool | None = None


_tokenize_decoder = msgspec.json.Decoder(TokenizeBody)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeBody)


class TokenizeRoutes:
    """The routes of one server.

    Args:
        read: the body of a request, if requests are taken.
    """

    def __init__(self, service: Service, read: Read) -> None:
        self._service = service
        self._tokenizer = service.tokenizer
        self._read = read
        self.table: dict[str, dict[str, Handler]] = {
            "/tokenize": {"POST": self._tokenize},
            "/v1/tokenize": {"POST": self._tokenize},
            "/detokenize": {"POST": self._detokenize},
            "/v1/detokenize": {"POST": self._detokenize},
        }

    async def _tokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw = await self._read(scope, receive)
        fields = decode(_tokenize_decoder, raw)
        self._service.placements.check_model(fields.model)
        await send_json(send, 200, await long_work.do(len(raw), lambda: self._tokenized(fields)))

    def _tokenized(self, fields: TokenizeBody) -> bytes:
        texts, is_list = self._texts(fields)
        special = flag(fields.add_special_tokens, default=fields.messages is None)
        ids = [self._tokenizer.encode(text, add_special_tokens=special) for text in texts]
        length = self._service.max_prompt_and_output
        if fields.model is not None:
            length = self._service.placements.max_model_len(fields.model)
        found: dict[str, Any] = {
            "count": [len(each) for each in ids] if is_list else len(ids[0]),
            "max_model_len": length,
            "tokens": ids if is_list else ids[0],
        }
        if fields.return_token_strs:
            names = [[self._service.token_names.name(token) for token in each] for each in ids]
            found["token_strs"] = names if is_list else names[0]
        return orjson.dumps(found)

    def _texts(self, fields: TokenizeBody) -> tuple[list[str], bool]:
        """What is to be tokenized, and whether it came as a list. RequestError: too much."""
        texts, is_list = self._given(fields)
        if sum(map(len, texts)) > MAX_CHARS:
            raise RequestError(
                f"what is to be tokenized may have at most {MAX_CHARS} characters in all",
                param="prompt" if fields.messages is None else "messages",
            )
        return texts, is_list

    def _given(self, fields: TokenizeBody) -> tuple[list[str], bool]:
        prompt = fields.text if fields.prompt is None else fields.prompt
        if (prompt is None) == (fields.messages is None):
            raise RequestError("send either prompt or messages", param="prompt")
        if fields.messages is not None:
            tools = {} if fields.tools is None else {"tools": fields.tools}
            text = self._tokenizer.render_chat(
                normalize_messages(fields.messages),
                add_generation_prompt=flag(fields.add_generation_prompt, default=True),
                kwargs={**tools, **(fields.chat_template_kwargs or {})},
            )
            return [text], False
        if isinstance(prompt, list):
            if not 0 < len(prompt) <= MAX_TEXTS:
                raise RequestError(f"prompt may hold 1 to {MAX_TEXTS} texts", param="prompt")
            return prompt, True
        return [prompt or ""], False

    async def _detokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw = await self._read(scope, receive)
        fields = decode(_detokenize_decoder, raw)
        self._service.placements.check_model(fields.model)
        if fields.tokens is None:
            raise RequestError("tokens is missing; send a list of token ids", param="tokens")
        tokens, skip = fields.tokens, flag(fields.skip_special_tokens)
        await send_json(
            send, 200, await long_work.do(len(raw), lambda: self._detokenized(tokens, skip))
        )

    def _detokenized(self, tokens: list[int | list[int]], skip: bool) -> bytes:
        rows, is_list = self._rows(tokens)
        texts = [self._tokenizer.decode(row, skip_special_tokens=skip) for row in rows]
        text: Any = texts if is_list else texts[0]
        # vLLM's clients read the one name, SGLang's the other.
        return orjson.dumps({"prompt": text, "text": text})

    def _rows(self, tokens: list[int | list[int]]) -> tuple[list[list[int]], bool]:
        """The ids of each text, and whether they came as a list of lists."""
        lists = [each for each in tokens if isinstance(each, list)]
        single = [each for each in tokens if isinstance(each, int)]
        if lists and single:
            raise RequestError("tokens: send ids, or lists of ids, not both", param="tokens")
        rows = lists or [single]
        self._check(rows)
        return rows, bool(lists)

    def _check(self, rows: list[list[int]]) -> None:
        if len(rows) > MAX_TEXTS or sum(map(len, rows)) > MAX_IDS:
            raise RequestError(
                f"tokens may hold at most {MAX_IDS} ids in {MAX_TEXTS} lists", param="tokens"
            )
        size = self._tokenizer.size
        largest = max((max(row, default=0) for row in rows), default=0)
        if largest >= size:
            raise RequestError(
                f"tokens: token id {largest} is outside 0 to {size - 1}", param="tokens"
            )
