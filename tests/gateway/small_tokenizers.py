"""Small tokenizers of the three families that checkpoints come with, made on the spot."""

import json
from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

CORPUS = [
    "the quick brown fox jumps over the lazy dog, don't it?",
    "Hello world! 12345 + 678 = 13023.",
    "안녕하세요 세계, 日本語のテキスト, naïve café, 😀🏳️‍🌈 emoji",
    "def f(x):\n    return x + 1\n\n",
] * 4
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level() -> Tokenizer:
    """As GPT-2, Qwen and Llama 3 have it; added tokens include what looks like encoded bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIALS,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(["<｜begin▁of▁sentence｜>"])
    tokenizer.add_tokens([AddedToken("<think>"), AddedToken("   ")])
    return tokenizer


def byte_fallback(*, strip: bool = True) -> Tokenizer:
    """As Llama 2 and Mistral (``strip``) or Gemma have it: SentencePiece pieces and raw bytes."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{b:02X}>": 3 + b for b in range(256)}
    for piece in ["▁", *"abcdefghijklmnopqrstuvwxyz .,!", "▁▁", "he", "▁he", "llo", "▁한"]:
        vocab.setdefault(piece, len(vocab))
    merges = [("h", "e"), ("▁", "he"), ("▁", "▁")]
    model = models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(
        [*steps, decoders.Strip(" ", 1, 0)] if strip else list(steps)
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def metaspace() -> Tokenizer:
    """A decoder that treats a text's first token differently: no table of bytes."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=150, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def word_piece() -> Tokenizer:
    """``##`` pieces join what stands before them."""
    words = ["[UNK]", "[SEP]", "hello", "world", "##s", "##ing", "a", "b", "##c"]
    tokenizer = Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.add_special_tokens(["[SEP]"])
    return tokenizer


def save(
    tokenizer: Tokenizer, path: Path, tokenizer_config: dict | None = None, **files: object
) -> Path:
    """A checkpoint directory; ``files`` are further JSON files by their stem."""
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    for name, content in {"tokenizer_config": tokenizer_config or {}, **files}.items():
        (path / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return path
