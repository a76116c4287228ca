"""Prompts in the domain of the embedded pair, as token ids in its chat format.

Written for the golden tests alone: what matters here is that both models write and that the
router has something to decide, not that the questions are new to the models.
"""

from random import Random

from tokenizers import Tokenizer

_NAMES = ("Eva", "Dan", "Maya", "Omar", "Tom", "Ana")
_THINGS = ("pencils", "flowers", "apples", "books", "coins")


def chat_prompts(count: int, rng: Random, tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of ``count`` questions, up to and with the assistant's header."""
    kinds = (_running, _compare, _direct)
    questions = [kinds[index % len(kinds)](rng) for index in range(count)]
    return [tokenizer.encode(_chat(q), add_special_tokens=False).ids for q in questions]


def _chat(question: str) -> str:
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def _running(rng: Random) -> str:
    name, thing = rng.choice(_NAMES), rng.choice(_THINGS)
    start, gone, more = rng.randint(60, 120), rng.randint(3, 50), rng.randint(3, 99)
    return (
        f"{name} has {start} {thing}. Then {name} gives away {gone}. "
        f"Later, {name} buys {more} more. How many {thing} does {name} have now?"
    )


def _compare(rng: Random) -> str:
    (one, two), thing = rng.sample(_NAMES, 2), rng.choice(_THINGS)
    first, fewer = rng.randint(50, 120), rng.randint(3, 48)
    return (
        f"{one} has {first} {thing}. {two} has {fewer} fewer {thing} than {one}. "
        f"How many {thing} do they have together?"
    )


def _direct(rng: Random) -> str:
    a, b, c = rng.randint(60, 150), rng.randint(3, 59), rng.randint(3, 99)
    return f"What is {a} - {b} + {c}?"
