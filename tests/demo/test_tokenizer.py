"""The tokenizer and template: lossless, digit by digit, and what training saw."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from trserve.demo import PAIR_DIR, model_path
from trserve.demo.data import IGNORED, collate, drill_segments, encode, problem_segments
from trserve.demo.grammar import drill_document, held_out, training_example
from trserve.demo.tokenizer_build import (
    EOS_ID,
    IM_END,
    MAX_CONTEXT,
    SPECIALS,
    load_tokenizer,
    messages,
    render_prompt,
)

TOKENIZER = load_tokenizer(PAIR_DIR / "tiny")
RNG = random.Random(3)
EXAMPLES = [training_example(RNG) for _ in range(300)]


@pytest.fixture(scope="module")
def hf_tokenizer():
    return AutoTokenizer.from_pretrained(model_path("small"))


@given(st.text())
def test_any_text_round_trips(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False) == text


def test_every_digit_is_one_token():
    ids = TOKENIZER.encode("a 1234567890 b12").tokens
    assert [t for t in ids if any(c.isdigit() for c in t)] == list("123456789012")


def test_specials_have_the_first_ids(hf_tokenizer):
    assert [TOKENIZER.token_to_id(token) for token in SPECIALS] == [0, 1, 2]
    assert hf_tokenizer.eos_token_id == EOS_ID
    assert hf_tokenizer.eos_token == IM_END
    assert hf_tokenizer.pad_token_id == 0
    assert hf_tokenizer.model_max_length == MAX_CONTEXT


def test_both_models_share_the_tokenizer():
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        tiny, small = ((model_path(model) / name).read_bytes() for model in ("tiny", "small"))
        assert tiny == small


@pytest.mark.parametrize("example", EXAMPLES[:60] + [e for e in EXAMPLES if e.history][:20])
def test_the_chat_template_is_the_training_prompt(example, hf_tokenizer):
    chat = messages(example)
    prompt = hf_tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert prompt == render_prompt(example)
    ids = hf_tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    document = encode(problem_segments(example), TOKENIZER)
    answer = TOKENIZER.encode(example.answer + IM_END).ids
    assert ids + answer == document.ids
    assert document.labels[len(ids) :] == answer
    if not example.history:
        assert set(document.labels[: len(ids)]) == {IGNORED}


def test_every_answer_of_a_conversation_carries_loss():
    example = next(e for e in EXAMPLES if len(e.history) > 1)
    document = encode(problem_segments(example), TOKENIZER)
    learnt = [label for label in document.labels if label != IGNORED]
    answers = [answer for _, answer in example.history] + [example.answer]
    assert TOKENIZER.decode(learnt, skip_special_tokens=False) == "".join(
        a + IM_END for a in answers
    )


def test_drills_learn_results_only():
    document = encode(drill_segments(drill_document(random.Random(1))), TOKENIZER)
    text = TOKENIZER.decode([x for x in document.labels if x != IGNORED])
    expected = "".join(result + "." for _, result in drill_document(random.Random(1)))
    assert text == expected
    assert document.ids == TOKENIZER.encode(TOKENIZER.decode(document.ids, False)).ids


def test_gaps_stay_within_the_context_and_shift_only_what_follows():
    example = next(e for e in EXAMPLES if e.history)
    document = encode(problem_segments(example), TOKENIZER, 3, 10 * MAX_CONTEXT)
    batch = collate([document, encode(problem_segments(held_out(1, 1)[0]), TOKENIZER)])
    start, gap = document.gap
    size = len(document.ids)
    assert batch.positions[0, :start].tolist() == list(range(start))
    assert batch.positions[0, start:size].tolist() == list(range(start + gap, size + gap))
    assert batch.positions[0, size - 1] == MAX_CONTEXT - 1
    assert batch.positions[1].tolist() == list(range(size))
    assert TOKENIZER.decode(document.ids[:start], False).endswith(f"{IM_END}\n")
