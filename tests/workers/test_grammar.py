"""Constrained rows: the mask, the state behind it, and that it follows committed tokens alone.

The reference applies llguidance to one request at a time, with a matcher that is made anew for
every token.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from tests.gateway.small_tokenizers import byte_fallback, byte_level, metaspace, save
from tests.gateway.stack import new_plan
from tests.workers.fakes import (
    EOS,
    VOCAB,
    World,
    hash_route,
    hash_token,
    reference,
    router_class,
    stay,
    world,
)
from trserve.errors import RequestError
from trserve.gateway.grammar_compiler import Wanted, compiled
from trserve.gateway.grammar_fields import Form
from trserve.gateway.tokenizer import Tokenizer
from trserve.ipc.baton import Finish
from trserve.params import RequestParams, SamplingParams, pack_grammar, unpack_grammar
from trserve.workers.grammar import Grammars, Vocabulary, create_grammars
from trserve.workers.sampler import NO_TOKEN, RowSampling, Sampler

PROMPT = [11, 12, 13, 14, 15]
LIMIT = 60
WORDS = ['{"', '":', '", "', '"}', "true", "false", "null", "ab", "ba", "[]", "{}", " 1", ", "]
ENDED = "<end>"
PIECES = [
    *(character.encode() for character in "0123456"),
    ENDED.encode(),
    *(character.encode() for character in '789{}[]":, \n-.abcdeflsutrn'),
    *(word.encode() for word in WORDS),
    b"\xc3",
    b"\xa9",
    b"b",  # a second id of the same text
]
PIECES += [b""] * (VOCAB - len(PIECES))


class Letters:
    """What is used of a tokenizer, over ``PIECES``; it encodes by the longest that fit."""

    size = VOCAB
    special_ids = frozenset({EOS})

    def token_bytes(self) -> list[bytes] | None:
        return PIECES

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids, rest = [], text.encode()
        while rest:
            fitting = [t for t, piece in enumerate(PIECES) if piece and rest.startswith(piece)]
            if not fitting:
                raise RequestError("no way to write it")
            ids.append(max(fitting, key=lambda token: len(PIECES[token])))
            rest = rest[len(PIECES[ids[-1]]) :]
        return ids


def new_grammars(tokenizer: Any = None) -> Grammars:
    return Grammars(lambda: tokenizer or Letters(), (EOS,))


def grammar(kind: str, source: str) -> bytes:
    return compiled(
        Wanted(Form(kind, source, kind), (), repeats=False, elements=False, reasons="never")  # type: ignore[arg-type]
    )


def text_of(tokens: Sequence[int]) -> str:
    return b"".join(PIECES[token] for token in tokens if token != EOS).decode()


class Source:
    """As the library asks; independent of the worker's own."""

    eos_token_id = EOS
    bos_token_id = None
    special_token_ids = (EOS,)
    tokens = PIECES

    def __call__(self, text: bytes) -> list[int]:
        return Letters().encode(text.decode(), add_special_tokens=False)


LIBRARY = LLTokenizer(TokenizerWrapper(Source()))


def allowed_after(packed: bytes, tokens: Sequence[int]) -> list[int]:
    """Ids that may follow ``tokens``, by a matcher of their own."""
    matcher = LLMatcher(LIBRARY, unpack_grammar(packed), log_level=0)
    assert matcher.consume_tokens(list(tokens))
    mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return np.flatnonzero(np.unpackbits(mask, bitorder="little")[:VOCAB]).tolist()


def constrained(packed: bytes) -> Callable[[int, Sequence[int]], int]:
    """What a model writes under the grammar: the best of what is allowed, as HashRunner has it."""

    def token(model: int, row: Sequence[int]) -> int:
        wanted = hash_token(model, row)
        allowed = allowed_after(packed, row[len(PROMPT) :])
        second = (wanted + 1) % VOCAB
        return next((t for t in (wanted, second) if t in allowed), allowed[0])

    return token


# ---- schemas, and what satisfies them ----

LEAVES: Any = st.sampled_from(
    [
        {"type": "integer", "minimum": -9, "maximum": 99},
        {"type": "boolean"},
        {"type": "null"},
        {"type": "string", "maxLength": 4},
        {"enum": ["ab", 1, None]},
        {"const": "bad"},
    ]
)


def _larger(inner: Any) -> Any:
    names = st.lists(st.sampled_from("abcd"), min_size=1, max_size=3, unique=True)
    objects = names.flatmap(
        lambda keys: st.tuples(*(inner for _ in keys)).map(
            lambda parts: {
                "type": "object",
                "properties": dict(zip(keys, parts, strict=True)),
                "required": keys,
                "additionalProperties": False,
            }
        )
    )
    return objects | inner.map(lambda part: {"type": "array", "items": part, "maxItems": 2})


SCHEMAS = st.recursive(LEAVES, _larger, max_leaves=4)


def satisfies(value: Any, schema: dict[str, Any]) -> bool:
    if "enum" in schema:
        return value in schema["enum"]
    if "const" in schema:
        return bool(value == schema["const"])
    kind = schema["type"]
    if kind == "integer":
        return type(value) is int and -9 <= value <= 99
    if kind == "string":
        return isinstance(value, str) and len(value) <= 4
    if kind == "array":
        items = schema["items"]
        return (
            isinstance(value, list) and len(value) <= 2 and all(satisfies(v, items) for v in value)
        )
    if kind == "object":
        parts = schema["properties"]
        return (
            isinstance(value, dict)
            and value.keys() == parts.keys()
            and all(satisfies(value[name], part) for name, part in parts.items())
        )
    return value is None if kind == "null" else isinstance(value, bool)


# ---- whole requests ----


def play(w: World, slots: Sequence[Any], replaced: Sequence[int]) -> None:
    """All requests to their ends; at each turn of ``replaced`` a worker is replaced by another."""
    for turn in range(3000):
        for index in range(len(w.workers)):
            if turn * 2 + index in replaced:
                w.workers[index] = w.create(index)
                w.workers[index].table.rescan()
            w.workers[index].turn()
        if all(w.baton(slot).finish is not Finish.NONE for slot in slots):
            return
    raise AssertionError("no end")


@given(
    st.lists(SCHEMAS, min_size=1, max_size=3),
    st.integers(1, 3),
    st.integers(0, 70),
    st.sets(st.integers(0, 80), max_size=3),
)
def test_any_schema_on_any_journey(
    schemas: list[dict[str, Any]], models: int, share: int, replaced: set[int]
) -> None:
    decide = hash_route(models - 1, share) if models > 1 else stay
    packed = [grammar("json", json.dumps(schema)) for schema in schemas]
    with world(
        workers=models, router=router_class(decide), grammars=new_grammars(), row_tokens=128
    ) as w:
        slots = [w.submit(PROMPT, limit=LIMIT, grammar=each) for each in packed]
        free = w.submit(PROMPT, limit=LIMIT)  # in the same batches
        play(w, [*slots, free], sorted(replaced))
        for slot, schema, each in zip(slots, schemas, packed, strict=True):
            found = w.outcome(slot)
            expected = reference(
                PROMPT, limit=LIMIT, models=models, decide=decide, token=constrained(each)
            )
            assert found == expected
            if found.finish is Finish.STOP:
                assert satisfies(json.loads(text_of(found.row[len(PROMPT) :])), schema)
        assert w.outcome(free) == reference(PROMPT, limit=LIMIT, models=models, decide=decide)


def test_steps_of_an_unchanged_batch_follow_it_too() -> None:
    packed = grammar("regex", "[a-f ]{40}")
    with world(workers=1, grammars=new_grammars(), row_tokens=128) as w:
        slot = w.submit(PROMPT, limit=LIMIT, grammar=packed)
        w.run(slot)
        expected = reference(PROMPT, limit=LIMIT, models=1, decide=stay, token=constrained(packed))
        assert w.outcome(slot) == expected
        assert len(text_of(expected.row[len(PROMPT) :])) == 40


@pytest.mark.parametrize("wishes", [{"ignore_eos": True}, {"min_tokens": 30}])
def test_a_finished_grammar_ends_an_answer_that_may_not_end(wishes: dict[str, Any]) -> None:
    packed = grammar("regex", "[a-f]{4}[01]*[a-f]|[a-f]{9}")
    decide = hash_route(1, 30)
    with world(
        workers=2, router=router_class(decide), grammars=new_grammars(), row_tokens=128
    ) as w:
        slot = w.submit(PROMPT, limit=LIMIT, grammar=packed, **wishes)
        w.run(slot)
        found = w.outcome(slot)
    assert found.finish is Finish.STOP and found.row[-1] == EOS
    assert found.row.count(EOS) == 1
    matcher = LLMatcher(LIBRARY, unpack_grammar(packed), log_level=0)
    assert matcher.consume_tokens(found.row[len(PROMPT) :]) and matcher.is_stopped()


def test_a_worker_takes_in_nothing_but_the_suffix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the context: each token is consumed once by each worker that samples after it."""
    consumed: list[int] = []
    real = Vocabulary.forbidden

    class Counting:
        def __init__(self, matcher: LLMatcher) -> None:
            self.matcher = matcher

        def consume_tokens(self, tokens: list[int]) -> bool:
            consumed.append(len(tokens))
            return self.matcher.consume_tokens(tokens)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.matcher, name)

    grammars = new_grammars()
    made = grammars.constraint

    def counted(params: RequestParams, prompt_len: int) -> Any:
        constraint = made(params, prompt_len)
        constraint._matcher = Counting(constraint._matcher)  # type: ignore[assignment]
        return constraint

    monkeypatch.setattr(grammars, "constraint", counted)
    monkeypatch.setattr(Vocabulary, "forbidden", lambda self, m: real(self, m.matcher))
    packed = grammar("regex", "[a-f0-9]{30}")
    decide = hash_route(1, 40)
    with world(workers=2, router=router_class(decide), grammars=grammars, row_tokens=128) as w:
        slot = w.submit(PROMPT, limit=LIMIT, grammar=packed)
        w.run(slot)
        found = w.outcome(slot)
    assert found.hops > 4
    assert sum(consumed) <= 2 * (len(found.row) - len(PROMPT))


def sample(constraint: Any, row: Sequence[int], logits: torch.Tensor, *, short: bool) -> int:
    mask = constraint.forbidden(np.array(row, np.int32), is_short=short)
    zeros, ones = np.zeros(1), np.ones(1)
    sampling = RowSampling(
        temperatures=zeros,
        top_k=zeros.astype(np.int64),
        top_p=ones,
        min_p=zeros,
        seeds=zeros.astype(np.uint64),
        positions=np.array([len(row)]),
        forbidden=[(0, mask)],
    )
    return int(Sampler().sample(logits, sampling)[0])


def constraint_of(source: str, **sampling: Any) -> Any:
    settings = {"temperature": 0.0, "eos_token_ids": (EOS,)} | sampling
    params = RequestParams(sampling=SamplingParams(**settings), grammar=grammar("regex", source))
    return new_grammars().constraint(params, len(PROMPT))


def test_an_end_that_is_not_wanted_waits_for_the_grammar() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, EOS] = 5.0
    zero, one = PIECES.index(b"0"), PIECES.index(b"1")
    for wishes, short in (({}, True), ({"ignore_eos": True}, False)):
        assert sample(constraint_of("[01]{1,2}", **wishes), PROMPT, logits, short=short) == zero
        row = [*PROMPT, zero]
        assert sample(constraint_of("[01]{1,2}", **wishes), row, logits, short=short) == zero
        row.append(one)
        assert sample(constraint_of("[01]{1,2}", **wishes), row, logits, short=short) == EOS
    row = [*PROMPT, zero]
    assert sample(constraint_of("[01]{1,2}"), row, logits, short=False) == EOS
    # A stop id that is text too is kept away as long as something else can follow.
    stop = constraint_of("[01]{1,2}", stop_token_ids=(zero,))
    assert sample(stop, PROMPT, logits, short=True) == one
    assert sample(constraint_of("00", stop_token_ids=(zero,)), PROMPT, logits, short=True) == zero


def test_logits_may_have_more_columns_or_fewer_than_the_tokenizer() -> None:
    one = PIECES.index(b"1")
    for width in (VOCAB + 30, EOS + 1):
        logits = torch.zeros(1, width)
        logits[0, -1] = 9.0
        assert sample(constraint_of("1a"), PROMPT, logits, short=False) == one


def test_a_grammar_that_cannot_be_followed_ends_the_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As where logits are not finite; others in its batches go on."""
    objects = [
        {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(k, k + 30)}}
        for k in range(60)
    ]
    schema = json.dumps({"anyOf": objects})
    with pytest.raises(RequestError, match="cannot be followed"):
        grammar("json", schema)
    packed = pack_grammar(LLMatcher.grammar_from_json_schema(schema))
    with world(workers=1, grammars=new_grammars(), row_tokens=128) as w:
        slot = w.submit(PROMPT, limit=LIMIT, grammar=packed)
        other = w.submit(PROMPT, limit=LIMIT, grammar=grammar("regex", "[01]{9}"))
        w.run(slot, other)
        assert w.outcome(slot).finish is Finish.NUMERIC_ERROR
        assert w.outcome(other).finish is Finish.STOP
    assert "could not be followed" in caplog.text


def test_all_forbidden_is_no_token() -> None:
    constraint = constraint_of("1")
    constraint._matcher.consume_tokens([PIECES.index(b"0")])
    assert sample(constraint, PROMPT, torch.zeros(1, VOCAB), short=False) == NO_TOKEN


class Spaced(Letters):
    """Puts a space before every text, as SentencePiece does."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return super().encode(" " + text, add_special_tokens=add_special_tokens)


class Naming(Letters):
    """Finds the name of a special token in texts."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [EOS] if text == ENDED else super().encode(text, add_special_tokens=False)


@pytest.mark.parametrize("tokenizer", [Letters(), Spaced(), Naming()])
def test_forced_text_has_the_bytes_that_are_forced(tokenizer: Letters) -> None:
    text = "ab0" if isinstance(tokenizer, Spaced) else "end"
    params = RequestParams(
        sampling=SamplingParams(eos_token_ids=(EOS,)), grammar=grammar("choice", f'["{text}"]')
    )
    constraint = new_grammars(tokenizer).constraint(params, 0)
    row: list[int] = []
    while not row or row[-1] != EOS:
        logits = torch.arange(VOCAB, dtype=torch.float32)[None]
        row.append(sample(constraint, row, logits, short=False))
        assert row[-1] != NO_TOKEN
        if len(row) == 1 and isinstance(tokenizer, Spaced):
            assert PIECES[row[0]] != b" "
    assert text_of(row) == text


@pytest.mark.parametrize("family", [byte_level, byte_fallback])
def test_tokenizers_of_both_families_spell_what_is_forced(family: Callable[[], Any]) -> None:
    tokenizer = Tokenizer(family(), eos_token_ids=[2])
    text = '{"the key": [1, "h\u00e9llo  \ud55c"]}'
    packed = grammar("choice", json.dumps([text]))
    params = RequestParams(sampling=SamplingParams(eos_token_ids=(2,)), grammar=packed)
    constraint = Grammars(lambda: tokenizer, (2,)).constraint(params, 0)
    row: list[int] = []
    while not row or row[-1] != 2:
        row.append(sample(constraint, row, torch.zeros(1, tokenizer.size), short=False))
        assert row[-1] != NO_TOKEN
    pieces = tokenizer.token_bytes()
    assert pieces is not None
    assert b"".join(pieces[token] for token in row[:-1]).decode() == text
    assert any(len(pieces[token]) > 1 for token in row[:-1])


def test_a_large_vocabulary_is_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = new_plan(tmp_path / "bytes")
    assert create_grammars(plan)._vocabulary is None
    monkeypatch.setattr("trserve.workers.grammar._LARGE", plan.tokenizer_size - 1)
    assert create_grammars(plan)._vocabulary is not None
    path = str(save(metaspace(), tmp_path / "none"))
    without_bytes = msgspec.structs.replace(plan, tokenizer_path=path)
    assert create_grammars(without_bytes)._vocabulary is None
    monkeypatch.setattr("trserve.workers.grammar.find_spec", lambda name: None)
    assert create_grammars(plan)._vocabulary is None
