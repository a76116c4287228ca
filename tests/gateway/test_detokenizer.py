"""A stream's text against decoding the whole at once, for tables of bytes and for windows."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from tests.gateway import small_tokenizers as small
from trserve.gateway.detokenizer import Detokenizer
from trserve.gateway.tokenizer import Tokenizer

BYTE_LEVEL = Tokenizer(small.byte_level())
LLAMA = Tokenizer(small.byte_fallback())
GEMMA = Tokenizer(small.byte_fallback(strip=False))
METASPACE = Tokenizer(small.metaspace())
WORD_PIECE = Tokenizer(small.word_piece())
TABLES = {"byte-level": BYTE_LEVEL, "llama": LLAMA, "gemma": GEMMA}


def single_bytes(tokenizer):
    """Id of the token for each byte."""
    table = tokenizer.token_bytes()
    return {piece[0]: i for i, piece in enumerate(table) if len(piece) == 1}


def pushes(tokenizer, ids, prompt=(), skip=True):
    detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens=skip)
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


def ids_of(tokenizer):
    return st.lists(st.integers(0, tokenizer.size - 1), max_size=40)


@pytest.mark.parametrize("name", TABLES)
@given(data=st.data(), skip=st.booleans())
def test_concatenation_is_the_decoded_whole(name, data, skip):
    tokenizer = TABLES[name]
    ids = data.draw(ids_of(tokenizer))
    text = "".join(pushes(tokenizer, ids, skip=skip))
    assert text == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("name", TABLES)
@given(data=st.data())
def test_text_is_a_function_of_the_output_alone(name, data):
    """Whatever the prompt ends in, its text is never emitted and the first space is kept."""
    tokenizer = TABLES[name]
    table = tokenizer.token_bytes()
    prompt, ids = data.draw(ids_of(tokenizer)), data.draw(ids_of(tokenizer))
    prompt.append(single_bytes(tokenizer)[ord("a")])
    shown = [i for i in ids if i not in tokenizer.special_ids]
    expected = b"".join(table[i] for i in shown).decode("utf-8", "replace")
    assert "".join(pushes(tokenizer, ids, prompt)) == expected


@given(st.binary(max_size=60))
def test_random_bytes_emit_the_longest_valid_prefix(data):
    byte_ids = single_bytes(BYTE_LEVEL)
    detokenizer = Detokenizer(BYTE_LEVEL, [])
    text = ""
    for n, byte in enumerate(data, 1):
        text += detokenizer.push(byte_ids[byte])
        whole = data[:n].decode("utf-8", "replace")
        # What is held back is fewer bytes than a character has, none of them a character yet.
        assert whole.startswith(text)
        assert set(whole[len(text) :]) <= {"\ufffd"}
        assert len(whole) - len(text) < 4
    assert text + detokenizer.flush() == data.decode("utf-8", "replace")


@given(st.text(max_size=30))
def test_no_replacement_character_that_the_text_does_not_have(text):
    byte_ids = single_bytes(BYTE_LEVEL)
    parts = pushes(BYTE_LEVEL, [byte_ids[b] for b in text.encode()])
    assert "".join(parts) == text
    assert parts[-1] == ""
    assert all(len(part) <= 1 for part in parts)


def test_emoji_in_pieces():
    text = "a😀🏳️‍🌈b"
    byte_ids = single_bytes(LLAMA)
    parts = pushes(LLAMA, [byte_ids[b] for b in text.encode()], [byte_ids[ord("x")]])
    assert "".join(parts) == text
    assert parts[1:5] == ["", "", "", "😀"]


def test_special_tokens_and_ids_past_the_vocabulary():
    end = BYTE_LEVEL.encode("<|im_end|>", add_special_tokens=False)
    assert pushes(BYTE_LEVEL, [*end, BYTE_LEVEL.size + 7]) == ["", "", ""]
    assert pushes(BYTE_LEVEL, end, skip=False) == ["<|im_end|>", ""]


def test_a_special_token_inside_a_character_splits_it_only_if_shown():
    first, second = (single_bytes(BYTE_LEVEL)[b] for b in "é".encode())
    assert "".join(pushes(BYTE_LEVEL, [first, 1, second])) == "é"
    shown = "".join(pushes(BYTE_LEVEL, [first, 1, second], skip=False))
    assert shown == "\ufffd<|im_start|>\ufffd"


def test_first_space_is_dropped_only_at_the_start_of_a_text():
    he, llo, bos = LLAMA.encode("hello", add_special_tokens=False)[0], 0, 1
    llo = LLAMA.token_bytes().index(b"llo")
    assert "".join(pushes(LLAMA, [he, llo], prompt=[bos])) == "hello"
    assert "".join(pushes(LLAMA, [he, llo], prompt=[bos, llo])) == " hello"
    assert "".join(pushes(GEMMA, [he, llo], prompt=[bos])) == " hello"
    assert "".join(pushes(LLAMA, [bos, he, he], prompt=[])) == "he he"


@pytest.mark.parametrize("tokenizer", [METASPACE, WORD_PIECE], ids=["metaspace", "wordpiece"])
@given(data=st.data(), skip=st.booleans())
def test_window_continues_the_prompt_as_the_whole_does(tokenizer, data, skip):
    def visible(ids):
        return [i for i in ids if not skip or i not in tokenizer.special_ids]

    ids = st.lists(st.integers(0, tokenizer.size - 1), min_size=8, max_size=20)
    prompt, output = data.draw(ids.filter(visible)), data.draw(ids)
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    whole = tokenizer.decode(prompt + output, skip_special_tokens=skip)
    if not before or not any(i not in tokenizer.special_ids for i in prompt[-8:]):
        return  # the window would begin with the output
    assert before + "".join(pushes(tokenizer, output, prompt, skip)) == whole


@pytest.mark.parametrize("tokenizer", [METASPACE, WORD_PIECE], ids=["metaspace", "wordpiece"])
@given(data=st.data(), skip=st.booleans())
def test_window_without_a_prompt_is_the_decoded_whole(tokenizer, data, skip):
    ids = data.draw(ids_of(tokenizer))
    text = "".join(pushes(tokenizer, ids, skip=skip))
    assert text == tokenizer.decode(ids, skip_special_tokens=skip)


def byte_window_tokenizer():
    """Bytes behind a decoder that drops the first space of a text *and* its last one."""
    vocab = {f"<0x{b:02X}>": b for b in range(256)} | {"a": 256, "▁b": 257}
    backend = Backend(models.BPE(vocab, [], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always")]
    )
    return Tokenizer(backend)


@given(st.text(alphabet="aé한😀", max_size=12))
def test_window_holds_back_unfinished_characters(text):
    tokenizer = byte_window_tokenizer()
    assert tokenizer.token_bytes() is None
    parts = pushes(tokenizer, list(text.encode()), [256])
    assert "".join(parts) == text
    assert all(len(part) <= 1 for part in parts)


def test_window_gives_up_on_bytes_that_complete_nothing():
    parts = pushes(byte_window_tokenizer(), [0xE2] * 10 + [256], [256])
    assert "".join(parts).endswith("a")
    assert parts[:3] == ["", "", ""]
    assert "\ufffd" in parts[3]  # four bytes without a character will not become one


def test_window_ignores_what_an_unfinished_prompt_began():
    first, *rest = "한".encode()
    text = "".join(pushes(byte_window_tokenizer(), [*rest, 256], [first]))
    assert "한" not in text
    assert text.endswith("a")


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, METASPACE], ids=["table", "window"])
def test_cost_of_a_token_does_not_grow_with_the_text(tokenizer):
    ids = tokenizer.encode("the quick brown fox 한국 ", add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, [])

    def seconds(rounds):
        begin = time.perf_counter()
        for _ in range(rounds):
            for i in ids:
                detokenizer.push(i)
        return time.perf_counter() - begin

    early = min(seconds(20) for _ in range(5))
    seconds(1000)
    assert min(seconds(20) for _ in range(5)) < 3 * early
