"""The pair's tokenizer: byte-level BPE over generated problems, and the ChatML template.

Any text round-trips (all 256 bytes are tokens) and every digit is one token, so a number is
spelled digit by digit and arithmetic is learnt per digit. Writes standard checkpoint files; knows
no model.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from trserve.demo.grammar import Problem, training_example

END_OF_TEXT: Final = "<|endoftext|>"
IM_START: Final = "<|im_start|>"
IM_END: Final = "<|im_end|>"
SPECIALS: Final = (END_OF_TEXT, IM_START, IM_END)
PAD_ID, IM_START_ID, EOS_ID = range(3)

CORPUS_EXAMPLES: Final = 20_000
MIN_FREQUENCY: Final = 20
MAX_TOKENS: Final = 1000
MAX_CONTEXT: Final = 1024
"""Longest position seen in training (see ``data.py``), hence the models' context limit.

Training shows at most four turns. The committed LLM answered 100 % of 60 held-out problems as a
first turn, 90 % as a second, 85 % as a fourth, 62 % as a sixth and 45 % as an eighth.
"""

WORD_PATTERN: Final = r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+"
"""A digit, a word, a run of marks, or a run of white space; numbers are a space, then digits."""

CHAT_TEMPLATE: Final = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def render_prompt(problem: Problem) -> str:
    """``problem`` as the chat template writes it, up to where the assistant begins to speak."""
    turns = [("system", problem.system)] if problem.system is not None else []
    for question, answer in problem.history:
        turns += [("user", question), ("assistant", answer)]
    turns.append(("user", problem.question))
    body = "".join(f"{IM_START}{role}\n{text}{IM_END}\n" for role, text in turns)
    return f"{body}{IM_START}assistant\n"


def messages(problem: Problem) -> list[dict[str, str]]:
    """``problem`` as a chat request, without its answer."""
    turns = [{"role": "system", "content": problem.system}] if problem.system is not None else []
    for question, answer in problem.history:
        turns.append({"role": "user", "content": question})
        turns.append({"role": "assistant", "content": answer})
    return [*turns, {"role": "user", "content": problem.question}]


def build_tokenizer(seed: int) -> Tokenizer:
    """Trains the tokenizer on freshly generated problems; the same seed gives the same one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MAX_TOKENS,
        min_frequency=MIN_FREQUENCY,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rng = random.Random(seed)
    examples = (training_example(rng) for _ in range(CORPUS_EXAMPLES))
    corpus = (text for p in examples for text in ("system user assistant", p.question, p.answer))
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja into ``directory``."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "add_bos_token": False,
        "added_tokens_decoder": {
            str(index): {
                "content": token,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
            for index, token in enumerate(SPECIALS)
        },
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": IM_END,
        "model_max_length": MAX_CONTEXT,
        "pad_token": END_OF_TEXT,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    text = json.dumps(config, indent=2) + "\n"
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def load_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of a checkpoint directory."""
    return Tokenizer.from_file(str(directory / "tokenizer.json"))
