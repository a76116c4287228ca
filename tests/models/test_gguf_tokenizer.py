"""The tokenizer of a GGUF file, held against the tokenizer that the file was written from."""

import json

import pytest
import tokenizers
from gguf import GGUFWriter
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from tests.models.gguf_writing import close
from trserve.errors import ModelUnavailableError
from trserve.models.gguf_tokenizer import read_gguf_tokenizer, tokenizer_from_gguf

TEXTS = (
    "",
    "Hello world, it's 2024!",
    "We'RE here;  they'll   come \t\n\n  soon\r\n",
    "1234567 12 3.14   42",
    "caf\u00e9 cafe\u0301 \u1100\u1161 \U0001f468\u200d\U0001f469\u200d\U0001f467 \u4f60\u597d",
    "<|im_start|>user\nHi<|im_end|>\n<tool>{}</tool>",
    "   leading and trailing   ",
    "def f(x):\n    return x**2  # a_b\n",
)
CORPUS = [*TEXTS, "the and of to in is it that 1 2 3 12 123 1234 -- == ** ...   "] * 4

QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


def split_by(pattern):
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def gpt2_words():
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


PRE_TOKENIZERS = {
    "gpt-2": gpt2_words,
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), gpt2_words()]
    ),
    "qwen2": lambda: split_by(QWEN2),
    "llama-bpe": lambda: split_by(LLAMA3),
}


def trained(name):
    """A byte-level BPE tokenizer as the published ones of this family are built."""
    backend = tokenizers.Tokenizer(models.BPE(ignore_merges=name == "llama-bpe"))
    if name == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = PRE_TOKENIZERS[name]()
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=450, initial_alphabet=alphabet, show_progress=False)
    )
    backend.add_special_tokens(["<|begin|>", "<|im_start|>", "<|im_end|>"])
    backend.add_tokens([AddedToken("<tool>", normalized=False)])
    return backend


def write_tokenizer(backend, path, pre, *, padding=3, templates=(), **changes):
    """``backend`` as a GGUF file without weights; ids of padding follow the tokens."""
    added = backend.get_added_tokens_decoder()
    tokens = [backend.id_to_token(i) for i in range(backend.get_vocab_size())]
    types = [1] * len(tokens)
    for i, token in added.items():
        types[i] = 3 if token.special else 4
    ids = {t.content: i for i, t in added.items()}
    values = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens + [f"[PAD{i}]" for i in range(padding)],
        "token_type": types + [5] * padding,
        "merges": [" ".join(pair) for pair in json.loads(backend.to_str())["model"]["merges"]],
        "bos_token_id": ids["<|begin|>"],
        "eos_token_id": ids["<|im_end|>"],
        "eot_token_id": ids["<|im_start|>"],
        **changes,
    }
    writer = GGUFWriter(path, "llama")
    for key, value in values.items():
        adders = {bool: writer.add_bool, int: writer.add_uint32, list: writer.add_array}
        if value is not None:
            adders.get(type(value), writer.add_string)(f"tokenizer.ggml.{key}", value)
    writer.add_string("tokenizer.chat_template", "{{ messages }}")
    for name in templates:
        writer.add_string(f"tokenizer.chat_template.{name}", f"{name} {{{{ messages }}}}")
    if templates:
        writer.add_array("tokenizer.chat_templates", list(templates))
    return close(writer, path)


@pytest.mark.parametrize("pre", list(PRE_TOKENIZERS))
def test_ids_and_texts_are_those_of_the_original(pre, tmp_path):
    original = trained(pre)
    copy = tokenizer_from_gguf(
        write_tokenizer(original, tmp_path / "t.gguf", pre, add_bos_token=False)
    )
    for text in TEXTS:
        expected = original.encode(text).ids
        assert copy.encode(text).ids == expected, text
        for skip in (False, True):
            assert copy.decode(expected, skip_special_tokens=skip) == original.decode(
                expected, skip_special_tokens=skip
            )
    # What is not used has no text, and no id.
    assert copy.get_vocab() == original.get_vocab()


def test_the_families_differ_on_these_texts():
    """Else the test above could not tell a wrong regular expression."""
    splits = {
        name: tuple(str(make().pre_tokenize_str(text)) for text in TEXTS if text)
        for name, make in PRE_TOKENIZERS.items()
    }
    assert len(set(splits.values())) == len(splits)


def test_what_stands_beside_the_ids(tmp_path):
    original = trained("qwen2")
    found = read_gguf_tokenizer(write_tokenizer(original, tmp_path / "t.gguf", "qwen2"))
    assert found.named == {"bos_token": "<|begin|>", "eos_token": "<|im_end|>"}
    assert found.eos_token_ids == tuple(map(original.token_to_id, ("<|im_end|>", "<|im_start|>")))
    assert found.chat_template == "{{ messages }}"
    special = {t.content for t in found.backend.get_added_tokens_decoder().values() if t.special}
    assert special == {"<|begin|>", "<|im_start|>", "<|im_end|>"}


def test_chat_templates_that_have_a_name(tmp_path):
    path = write_tokenizer(trained("gpt-2"), tmp_path / "t.gguf", "gpt-2", templates=["tool_use"])
    assert read_gguf_tokenizer(path).chat_template == {
        "default": "{{ messages }}",
        "tool_use": "tool_use {{ messages }}",
    }


@pytest.mark.parametrize(
    ("pre", "flags", "before", "after"),
    [
        ("qwen2", {}, [], []),
        ("llama-bpe", {}, ["<|begin|>"], []),
        ("llama-bpe", {"add_bos_token": False}, [], []),
        ("qwen2", {"add_bos_token": True, "add_eos_token": True}, ["<|begin|>"], ["<|im_end|>"]),
    ],
)
def test_ids_around_a_text(pre, flags, before, after, tmp_path):
    original = trained(pre)
    copy = tokenizer_from_gguf(write_tokenizer(original, tmp_path / "t.gguf", pre, **flags))
    plain = original.encode("Hello").ids
    around = [[original.token_to_id(token) for token in tokens] for tokens in (before, after)]
    assert copy.encode("Hello").ids == around[0] + plain + around[1]
    assert copy.encode("Hello", add_special_tokens=False).ids == plain


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "llama"}, "kind 'llama'.*tokenizer.json beside"),
        ({"pre": "tekken"}, "'tekken'.*gpt-2, smollm, qwen2"),
        ({"merges": None}, "lacks 'merges'"),
        ({"merges": ["zz zzz"]}, "no usable tokenizer"),
        ({"token_type": [1]}, "no usable tokenizer"),
    ],
)
def test_unusable_tokenizers_are_named(changes, message, tmp_path):
    path = write_tokenizer(trained("gpt-2"), tmp_path / "t.gguf", **{"pre": "gpt-2", **changes})
    with pytest.raises(ModelUnavailableError, match=message):
        read_gguf_tokenizer(path)
