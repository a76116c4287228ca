"""The grammar: answers are arithmetically right, the splits are disjoint, the text is sane."""

import random
import re
import zlib
from collections import Counter

import pytest

from trserve.demo import grammar
from trserve.demo.smalltalk import REFUSAL, TOPICS, pseudo_word, small_talk

EQUATION = re.compile(r"(\d+) ([-+*]) (\d+) = (\d+)")
APPLY = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
HELD_OUT = grammar.held_out(500, seed=11)


def by_hand(problem):
    """Solves ``problem`` from its question alone, without looking at the generator's answer."""
    numbers = [int(n) for n in re.findall(r"\d+", problem.question)]
    match problem.kind:
        case "direct":
            text = problem.question
            for word, op in (("plus", "+"), ("minus", "-"), ("times", "*")):
                text = text.replace(word, op)
            return eval("".join(re.findall(r"\d+|[-+*]", text)))
        case "shop":
            money, count, price = numbers
            return money - count * price
        case "bus":
            start, *changes = numbers
            return start - sum(changes[::2]) + sum(changes[1::2])
        case "compare":
            first, n = numbers
            second = first + n if " more " in problem.question else first - n
            return second if "together" not in problem.question and (
                "in total" not in problem.question
            ) else first + second  # fmt: skip
    return running_by_hand(problem.question)


def running_by_hand(question):
    gains = "buys|finds|gets|receives|collects|wins"
    losses = "gives away|gives|loses|sells|uses|drops|throws away|eats"
    action = rf"({gains}|{losses}) (\d+)(?: \w+ with (\d+))?"
    total = int(re.search(r"(?:has|starts with) (\d+)", question)[1])
    for verb, n, each in re.findall(action, question):
        amount = int(n) * int(each or 1)
        total += amount if verb in gains.split("|") else -amount
    return total


@pytest.mark.parametrize("problem", HELD_OUT[:200], ids=lambda p: p.kind)
def test_the_answer_follows_from_the_question(problem):
    assert by_hand(problem) == problem.value


def test_every_equation_holds_and_the_last_result_is_the_answer():
    for problem in HELD_OUT:
        equations = EQUATION.findall(problem.answer)
        assert equations
        for a, op, b, result in equations:
            assert APPLY[op](int(a), int(b)) == int(result)
            assert 0 <= int(result) <= 400
        assert problem.value == int(equations[-1][3])
        assert grammar.extract_answer(problem.answer) == problem.value


def test_drills_are_right_and_within_the_problems_range():
    rng = random.Random(5)
    for _ in range(200):
        for asked, result in grammar.drill_document(rng):
            a, op, b, equals = asked.split()
            assert equals == "="
            assert APPLY[op](int(a), int(b)) == int(result) >= 0


def test_training_never_sees_a_held_out_question():
    rng = random.Random(6)
    for _ in range(5000):
        example = grammar.training_example(rng)
        turns = [*example.history, (example.question, example.answer)]
        for question, answer in turns:
            if grammar.extract_answer(answer) is not None:
                assert zlib.crc32(question.encode()) % 50 != 0


def test_held_out_is_distinct_deterministic_and_of_every_kind():
    assert grammar.held_out(100, seed=11) == HELD_OUT[:100]
    assert len({p.question for p in HELD_OUT}) == 500
    assert all(zlib.crc32(p.question.encode()) % 50 == 0 for p in HELD_OUT)
    assert {p.kind for p in HELD_OUT} == {"running", "compare", "shop", "bus", "direct"}
    assert not {p.question for p in grammar.held_out(50, seed=12)} & {p.question for p in HELD_OUT}


def test_the_mixture_has_the_stated_shares():
    rng = random.Random(7)
    examples = [grammar.training_example(rng) for _ in range(4000)]
    conversations = sum(bool(e.history) for e in examples) / 4000
    single = [e for e in examples if not e.history]
    chat = sum(e.kind is None for e in single) / len(single)
    assert conversations == pytest.approx(grammar.CONVERSATION_SHARE, abs=0.02)
    assert chat == pytest.approx(grammar.SMALL_TALK_SHARE, abs=0.02)
    assert sum(e.system is not None for e in examples) / 4000 == pytest.approx(0.06, abs=0.02)


def test_first_messages_are_small_right_and_not_held_out():
    rng = random.Random(10)
    messages = [grammar.first_message(rng) for _ in range(500)]
    problems = [m for m in messages if m.kind is not None]
    for problem in problems:
        assert by_hand(problem) == problem.value
        assert not grammar.is_held_out(problem.question)
        assert max(int(n) for n in re.findall(r"\d+", problem.question)) <= 15
    assert 0.6 < len(problems) / len(messages) < 0.8
    assert all(m.answer != REFUSAL for m in messages)


def test_two_actions_share_a_sentence_often_enough():
    joined = [
        p for p in HELD_OUT if p.kind == "running" and re.search(r"\d[^.?]* and ", p.question)
    ]
    assert len(joined) > 0.1 * sum(p.kind == "running" for p in HELD_OUT)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("The answer is 12.", 12),
        ("The answer is 1. No. The answer is 2.", 2),
        ("The answer is 12", None),
        ("12", None),
        ("", None),
        ("The answer is -3.", -3),
    ],
)
def test_extract_answer(text, value):
    assert grammar.extract_answer(text) == value


def test_small_talk_fills_every_slot_and_reaches_every_topic():
    rng = random.Random(8)
    talks = [small_talk(rng) for _ in range(3000)]
    assert not any(set("{}") & set(message) for message, _ in talks)
    assert all(message for message, _ in talks)
    replies = Counter(reply for _, reply in talks)
    assert set(replies) == {topic.reply for topic in TOPICS}
    assert replies[REFUSAL] == max(replies.values())


def test_invented_words_are_many():
    rng = random.Random(9)
    assert len({pseudo_word(rng) for _ in range(1000)}) > 700
