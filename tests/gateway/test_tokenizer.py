"""Loading, ids, bytes and fingerprints, against the tokenizers library and transformers."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from tests.gateway import small_tokenizers as small
from trserve.errors import ConfigError, ModelUnavailableError, RequestError
from trserve.gateway.tokenizer import Tokenizer

BYTE_LEVEL = small.byte_level()
BYTE_FALLBACK = small.byte_fallback()


def token_ids(backend):
    return st.lists(st.integers(0, backend.get_vocab_size() - 1), max_size=30)


def load(backend, tmp_path, tokenizer_config=None, **files):
    return Tokenizer.load(small.save(backend, tmp_path, tokenizer_config, **files))


def test_size_special_and_end_ids(tmp_path):
    config = {"bos_token": {"content": "<|endoftext|>"}, "eos_token": "<|im_end|>"}
    tokenizer = load(
        small.byte_level(),
        tmp_path,
        config,
        config={"eos_token_id": 0},
        generation_config={"eos_token_id": [2, 0, 1]},
    )
    assert tokenizer.size == max(BYTE_LEVEL.get_vocab().values()) + 1
    assert tokenizer.bos_token_id == 0
    assert tokenizer.eos_token_ids == (2, 0, 1)
    assert tokenizer.special_ids == {0, 1, 2, BYTE_LEVEL.token_to_id("<｜begin▁of▁sentence｜>")}


def test_without_configuration_there_is_no_end(tmp_path):
    small.byte_level().save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (None, ())
    assert not tokenizer.has_chat_template


def test_special_tokens_map_is_read_where_the_config_is_silent(tmp_path):
    tokenizer = load(
        small.byte_level(), tmp_path, {}, special_tokens_map={"eos_token": {"content": "<think>"}}
    )
    think = BYTE_LEVEL.token_to_id("<think>")
    assert tokenizer.eos_token_ids == (think,)
    assert tokenizer.decode([think], skip_special_tokens=True) == ""  # never shown as text


def test_a_configured_token_that_does_not_exist_gets_no_id(tmp_path):
    tokenizer = load(small.byte_level(), tmp_path, {"eos_token": "<none>", "pad_token": "<none>"})
    assert tokenizer.eos_token_ids == ()
    assert tokenizer.size == BYTE_LEVEL.get_vocab_size()


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json"])
def test_malformed_file_is_named(tmp_path, name):
    small.save(small.byte_level(), tmp_path)
    (tmp_path / name).write_text("{", encoding="utf-8")
    with pytest.raises(ModelUnavailableError, match=name):
        Tokenizer.load(tmp_path)


def test_missing_tokenizer_is_named(tmp_path):
    with pytest.raises(ModelUnavailableError, match=r"tokenizer\.json does not exist"):
        Tokenizer.load(tmp_path / "nowhere")


def test_configuration_that_is_not_an_object(tmp_path):
    small.save(small.byte_level(), tmp_path, generation_config=[1])
    with pytest.raises(ModelUnavailableError, match="must hold a JSON object"):
        Tokenizer.load(tmp_path)


def test_truncation_of_the_file_is_off(tmp_path):
    backend = small.byte_level()
    backend.enable_truncation(max_length=4)
    backend.enable_padding(length=16)
    tokenizer = load(backend, tmp_path)
    ids = tokenizer.encode("the quick brown fox " * 8, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the quick brown fox " * 8


@pytest.mark.parametrize("flag", [{}, {"add_bos_token": True}, {"add_bos_token": False}])
@pytest.mark.parametrize("processor", [None, "<s> $A", "<s> $A </s>"])
def test_special_tokens_around_a_text_as_transformers(tmp_path, flag, processor):
    from transformers import AutoTokenizer

    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", **flag}
    backend = small.byte_fallback()
    if processor is not None:
        backend.post_processor = TemplateProcessing(
            single=processor, special_tokens=[("<s>", 1), ("</s>", 2)]
        )
    ours = load(backend, tmp_path, config)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for special in (True, False):
        expected = theirs.encode("hello", add_special_tokens=special)
        assert ours.encode("hello", add_special_tokens=special) == expected


def test_text_without_a_token_is_refused(tmp_path):
    from tokenizers import Tokenizer as Backend
    from tokenizers import models

    tokenizer = load(Backend(models.WordLevel({"a": 0}, unk_token="[UNK]")), tmp_path)
    with pytest.raises(RequestError, match="cannot encode"):
        tokenizer.encode("b", add_special_tokens=False)


@given(st.text())
def test_byte_level_round_trip(text):
    tokenizer = Tokenizer(BYTE_LEVEL)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@given(token_ids(BYTE_LEVEL), st.booleans())
def test_byte_level_decode_equals_the_library(ids, skip):
    tokenizer = Tokenizer(BYTE_LEVEL)
    expected = BYTE_LEVEL.decode(ids, skip_special_tokens=skip)
    assert tokenizer.decode(ids, skip_special_tokens=skip) == expected


@given(st.text(alphabet="helo 한é😀!"), st.booleans())
def test_byte_fallback_decode_equals_the_library(text, strip):
    backend = small.byte_fallback(strip=strip)
    tokenizer = Tokenizer(backend)
    ids = [1, *tokenizer.encode(text, add_special_tokens=False), 2]
    for skip in (True, False):
        expected = backend.decode(ids, skip_special_tokens=skip)
        assert tokenizer.decode(ids, skip_special_tokens=skip) == expected


def test_byte_fallback_keeps_what_is_valid_beside_an_invalid_byte():
    tokenizer = Tokenizer(BYTE_FALLBACK)
    ids = [BYTE_FALLBACK.token_to_id(f"<0x{b:02X}>") for b in "é".encode() + b"\xff"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "é\ufffd"


@pytest.mark.parametrize("build", [small.metaspace, small.word_piece])
def test_context_dependent_decoders_have_no_bytes(build):
    backend = build()
    tokenizer = Tokenizer(backend)
    assert tokenizer.token_bytes() is None
    assert tokenizer.token_texts is None
    ids = list(range(backend.get_vocab_size()))
    assert tokenizer.decode(ids, skip_special_tokens=True) == backend.decode(ids)


def test_added_tokens_are_their_text_even_if_it_looks_encoded():
    backend = small.byte_level()
    backend.add_special_tokens(["é"])
    backend.add_tokens(["naï"])
    tokenizer = Tokenizer(backend)
    ids = [backend.token_to_id("é"), backend.token_to_id("naï")]
    assert tokenizer.decode(ids, skip_special_tokens=False) == "énaï"
    assert tokenizer.token_bytes()[backend.token_to_id("<|im_end|>")] == b"<|im_end|>"
    sentence_piece = small.byte_fallback()
    sentence_piece.add_special_tokens(["<end▁of▁turn>"])
    text = "<end▁of▁turn>"
    assert Tokenizer(sentence_piece).decode(
        [sentence_piece.token_to_id(text)], skip_special_tokens=False
    ) == (text)


def test_ids_outside_of_the_vocabulary_have_no_text():
    tokenizer = Tokenizer(BYTE_LEVEL)
    a = BYTE_LEVEL.token_to_id("a")
    assert tokenizer.decode([-1, a, tokenizer.size, 2**31], skip_special_tokens=True) == "a"


def test_holes_in_the_vocabulary_have_no_text():
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    backend = Backend(models.BPE({"a": 0, "b": 5}, []))
    backend.decoder = decoders.ByteLevel()
    assert Tokenizer(backend).token_bytes() == [b"a", b"", b"", b"", b"", b"b"]


def test_fingerprint_is_about_ids_and_text_only():
    base = Tokenizer(BYTE_LEVEL).fingerprint()
    assert Tokenizer(small.byte_level()).fingerprint() == base
    remarked = small.byte_level()
    remarked.add_special_tokens(["<think>"])
    remarked.pre_tokenizer = None
    assert Tokenizer(remarked).fingerprint() == base
    longer = small.byte_level()
    longer.add_tokens(["<extra>"])
    assert Tokenizer(longer).fingerprint() != base


def test_fingerprint_sees_swapped_ids_and_other_decoders():
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    def fingerprint(vocab, decoder):
        backend = Backend(models.BPE(vocab, []))
        backend.decoder = decoder
        return Tokenizer(backend).fingerprint()

    same, swapped = {"Ġ": 0, "b": 1}, {"b": 0, "Ġ": 1}
    prints = {
        fingerprint(same, decoders.ByteLevel()),
        fingerprint(swapped, decoders.ByteLevel()),
        fingerprint(same, decoders.Metaspace()),
        fingerprint(same, decoders.Metaspace(replacement="_")),
        fingerprint(swapped, decoders.Metaspace()),
    }
    assert len(prints) == 5


def test_templates_are_found_where_checkpoints_keep_them(tmp_path):
    inline = {"chat_template": "inline {{ messages[0].content }}"}
    messages = [{"role": "user", "content": "x"}]
    assert load(small.byte_level(), tmp_path / "a", inline).render_chat(messages) == "inline x"

    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    tokenizer = load(small.byte_level(), tmp_path / "b", {"chat_template": named})
    assert tokenizer.render_chat(messages) == "D"
    assert tokenizer.render_chat(messages, kwargs={"tools": []}) == "T"

    by_name = {"chat_template": {"default": "D", "tool_use": "T"}}
    assert load(small.byte_level(), tmp_path / "d", by_name).render_chat(messages) == "D"

    path = small.save(small.byte_level(), tmp_path / "c", inline)
    (path / "chat_template.jinja").write_text("file", encoding="utf-8")
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "tool_use.jinja").write_text("TF", encoding="utf-8")
    assert Tokenizer.load(path).render_chat(messages) == "file"
    assert Tokenizer.load(path).render_chat(messages, kwargs={"tools": [1]}) == "TF"
    assert Tokenizer.load(path, chat_template="mine").render_chat(messages) == "mine"


@pytest.mark.parametrize(
    "template",
    [
        ["text"],
        [{"name": "default"}],
        [{"name": 1, "template": "x"}],
        {"default": 1},
        [{"name": [], "template": "x"}],
        5,
    ],
)
def test_a_template_of_another_kind_is_named(tmp_path, template):
    named = r"tokenizer_config\.json: chat_template should be a text, or a list of"
    with pytest.raises(ModelUnavailableError, match=named):
        load(small.byte_level(), tmp_path, {"chat_template": template})


def test_a_template_that_is_no_text_is_named(tmp_path):
    small.save(small.byte_level(), tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe{\x00")
    with pytest.raises(ModelUnavailableError, match=r"chat_template\.jinja is not UTF-8 text"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("key", ["extra_special_tokens", "additional_special_tokens"])
def test_special_tokens_of_another_kind_are_named(tmp_path, key):
    with pytest.raises(ModelUnavailableError, match=rf"tokenizer_config\.json: .*{key} .*is 5"):
        load(small.byte_level(), tmp_path, {key: 5})


def test_no_template_and_broken_template(tmp_path):
    tokenizer = load(small.byte_level(), tmp_path)
    with pytest.raises(RequestError, match="no chat template") as refused:
        tokenizer.render_chat([{"role": "user", "content": "x"}])
    assert (refused.value.status, refused.value.param) == (400, "messages")
    with pytest.raises(ConfigError, match="line 1"):
        Tokenizer.load(tmp_path, chat_template="{% if %}")


def test_threads_may_share_one():
    tokenizer = Tokenizer(small.byte_level())
    text = "the quick brown fox 😀 " * 50
    results = []

    def work():
        ids = tokenizer.encode(text, add_special_tokens=False)
        results.append(tokenizer.decode(ids, skip_special_tokens=True))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [text] * 8


def test_other_threads_run_while_a_long_text_is_encoded():
    tokenizer = Tokenizer(small.byte_level())
    thread = threading.Thread(
        target=tokenizer.encode, args=("a" * 1_000_000,), kwargs={"add_special_tokens": False}
    )
    thread.start()
    ticks = 0
    while thread.is_alive():
        thread.join(0.001)
        ticks += 1
    assert ticks > 10


def test_the_configuration_wins_over_special_tokens_map(tmp_path):
    tokenizer = load(
        small.byte_level(),
        tmp_path,
        {"eos_token": "<|im_end|>"},
        special_tokens_map={"eos_token": "<|endoftext|>"},
    )
    assert tokenizer.eos_token_ids == (2,)
