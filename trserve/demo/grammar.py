"""The arithmetic word problems that the demo pair is trained and measured on.

A problem's answer is a function of its question: no free wording, so a model's uncertainty is
about arithmetic. Questions whose CRC-32 is a multiple of 50 are held out: training never sees
one, in whatever turn. Knows nothing of tokens or tensors.
"""

from __future__ import annotations

import random
import re
import zlib
from dataclasses import dataclass
from typing import Final

from trserve.demo import words
from trserve.demo.problems import MAKERS, MAX_TOTAL, Kind, Ledger, operand, small_problem
from trserve.demo.smalltalk import first_words, small_talk

HELD_OUT_MODULUS: Final = 50
KIND_SHARES: Final[dict[Kind, float]] = {
    "running": 0.50,
    "compare": 0.17,
    "shop": 0.10,
    "bus": 0.08,
    "direct": 0.15,
}
SMALL_TALK_SHARE: Final = 0.08
SMALL_TALK_LAST_SHARE: Final = 0.3
SYSTEM_SHARE: Final = 0.06
CONVERSATION_SHARE: Final = 0.10
DRILL_OPERATIONS: Final = 9

_FINAL = re.compile(r"The answer is (-?\d+)\.")


@dataclass(frozen=True, slots=True)
class Problem:
    """One question with its reference answer.

    ``value`` and ``kind`` are None for small talk; ``history`` holds the earlier
    (question, answer) turns.
    """

    question: str
    answer: str
    value: int | None
    system: str | None = None
    kind: Kind | None = None
    history: tuple[tuple[str, str], ...] = ()


def is_held_out(question: str) -> bool:
    """Whether ``question`` belongs to the test split."""
    return zlib.crc32(question.encode()) % HELD_OUT_MODULUS == 0


def extract_answer(text: str) -> int | None:
    """The number of the last "The answer is N." in ``text``, None where there is none."""
    found = _FINAL.findall(text)
    return int(found[-1]) if found else None


def held_out(count: int, seed: int) -> list[Problem]:
    """``count`` distinct single-turn arithmetic problems of the test split."""
    rng = random.Random(seed)
    problems: dict[str, Problem] = {}
    while len(problems) < count:
        problem = _arithmetic(rng)
        if is_held_out(problem.question):
            problems.setdefault(problem.question, problem)
    return list(problems.values())


def training_example(rng: random.Random) -> Problem:
    """A problem, small talk or a conversation of several turns; none of it held out."""
    system = rng.choice(words.SYSTEM_MESSAGES) if rng.random() < SYSTEM_SHARE else None
    last = _training_turn(rng)
    if rng.random() >= CONVERSATION_SHARE:
        return Problem(last.question, last.answer, last.value, system, last.kind)
    history = [_training_turn(rng) for _ in range(rng.choice((1, 1, 1, 1, 2, 3)))]
    if rng.random() < SMALL_TALK_LAST_SHARE:
        # Conversations are where thanks and goodbyes happen.
        last = Problem(*small_talk(rng), None)
    turns = tuple((turn.question, turn.answer) for turn in history)
    return Problem(last.question, last.answer, last.value, system, last.kind, turns)


def first_message(rng: random.Random) -> Problem:
    """What people type first: a bare greeting, or a sum with small numbers; none held out."""
    if rng.random() < 0.3:
        return Problem(*first_words(rng), None)
    while is_held_out((problem := _as_problem(*small_problem(rng))).question):
        pass
    return problem


def drill_document(rng: random.Random) -> list[tuple[str, str]]:
    """Independent operations as (``"230 - 54 ="``, ``"176"``); only results are worth learning.

    Operand ranges are those of the problems, so the drills are dense practice of the hard tokens.
    """
    return [_operation(rng) for _ in range(DRILL_OPERATIONS)]


def _operation(rng: random.Random) -> tuple[str, str]:
    draw = rng.random()
    if draw < 0.12:
        a, b = rng.randint(2, 9), rng.randint(2, 9)
        return f"{a} * {b} =", str(a * b)
    if draw < 0.56:
        a = rng.randint(2, 190)
        b = operand(rng)
        return f"{a} + {b} =", str(a + b)
    a = rng.randint(5, MAX_TOTAL)
    b = operand(rng, a)
    return f"{a} - {b} =", str(a - b)


def _training_turn(rng: random.Random) -> Problem:
    if rng.random() < SMALL_TALK_SHARE:
        return Problem(*small_talk(rng), None)
    while is_held_out((problem := _arithmetic(rng)).question):
        pass
    return problem


def _arithmetic(rng: random.Random) -> Problem:
    kind = rng.choices(tuple(KIND_SHARES), tuple(KIND_SHARES.values()))[0]
    return _as_problem(kind, MAKERS[kind](rng))


def _as_problem(kind: Kind, ledger: Ledger) -> Problem:
    answer = " ".join([*ledger.told, f"The answer is {ledger.total}."])
    return Problem(" ".join(ledger.asked), answer, ledger.total, None, kind)
