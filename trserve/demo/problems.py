"""The five kinds of arithmetic word problem: what is asked, and what the answer says.

Each maker draws the question and derives the answer from it. Knows nothing of splits, chats or
tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal

from trserve.demo import words
from trserve.demo.smalltalk import pseudo_word

Kind = Literal["running", "compare", "shop", "bus", "direct"]

RARE_WORD_SHARE: Final = 0.25
JOINED_SHARE: Final = 0.25
MAX_TOTAL: Final = 250


@dataclass(slots=True)
class Ledger:
    """A quantity that changes step by step, with the question and the answer said so far."""

    total: int
    asked: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    small: bool = False


@dataclass(frozen=True, slots=True)
class _Scene:
    """Who has what: the slots that the sentences of one problem share."""

    name: str
    p: str
    things: str
    other: str

    def say(self, template: str, **slots: object) -> str:
        return template.format(
            name=self.name, p=self.p, P=self.p.capitalize(), things=self.things,
            other=self.other, **slots,
        )  # fmt: skip


def operand(rng: random.Random, at_most: int = 99, small: bool = False) -> int:
    """3-99, small ones a little more often than uniform; 1-12 if ``small``; at most ``at_most``."""
    if small:
        return rng.randint(1, max(1, min(12, at_most)))
    high = min(99, at_most)
    if rng.random() < 0.1:
        high = min(high, 9)
    return rng.randint(min(3, high), high)


def _person(rng: random.Random) -> tuple[str, str]:
    if rng.random() >= RARE_WORD_SHARE:
        return rng.choice(words.COMMON_NAMES)
    name = rng.choice(words.RARE_NAMES) if rng.random() < 0.5 else pseudo_word(rng).capitalize()
    # Drawn freely, so that the pronoun is read from the question, not guessed from the name.
    return name, rng.choice((words.HE, words.SHE))


def _things(rng: random.Random) -> str:
    if rng.random() >= RARE_WORD_SHARE:
        return rng.choice(words.COMMON_THINGS)
    return rng.choice(words.RARE_THINGS) if rng.random() < 0.6 else pseudo_word(rng) + "s"


def _scene(rng: random.Random) -> _Scene:
    name, pronoun = _person(rng)
    while (other := _person(rng)[0]) == name:
        pass
    return _Scene(name, pronoun, _things(rng), other)


def small_problem(rng: random.Random) -> tuple[Kind, Ledger]:
    """A running or direct problem with the numbers that a person tries first: 2 + 2, say."""
    if rng.random() < 0.6:
        return "direct", _direct(rng, small=True)
    return "running", _running(rng, small=True)


def _running(rng: random.Random, small: bool = False) -> Ledger:
    scene = _scene(rng)
    start = rng.randint(2, 15) if small else rng.randint(11, 120)
    ledger = Ledger(start, small=small)
    opening = scene.say(rng.choice(words.OPENINGS), n=ledger.total)
    ledger.told.append(scene.say("{name} starts with {n} {things}.", n=ledger.total))
    phrases = [_step(ledger, scene, rng) for _ in range(rng.choice((1, 2, 2, 2, 3)))]
    ledger.asked += _narrate(opening, [asked for asked, _ in phrases], scene, rng)
    closings: tuple[str, ...] = words.CLOSINGS
    if phrases[-1][1] and rng.random() < 0.5:
        closings = words.CLOSING_AFTER_LOSS
    ledger.asked.append(scene.say(rng.choice(closings)))
    return ledger


def _narrate(opening: str, phrases: list[str], scene: _Scene, rng: random.Random) -> list[str]:
    """Spreads the actions over sentences; some sentences carry two of them."""
    sentences: list[str] = []
    rest = list(phrases)
    lead = opening
    if rng.random() < JOINED_SHARE / 3:
        lead += " and " + rest.pop(0)
    sentences.append(lead + ".")
    while rest:
        sentence = scene.say(rng.choice(words.CONNECTIVES)) + " " + rest.pop(0)
        if rest and rng.random() < JOINED_SHARE:
            sentence += rng.choice((" and ", " and ", " and then ")) + rest.pop(0)
        sentences.append(sentence + ".")
    return sentences


def _step(ledger: Ledger, scene: _Scene, rng: random.Random) -> tuple[str, bool]:
    """Applies one action; returns its phrase and whether something was taken away."""
    old = ledger.total
    if rng.random() < 0.12 and old <= 170:
        return _boxes(ledger, scene, rng), False
    loss = old > 160 or (old >= 5 and rng.random() < 0.5)
    n = operand(rng, old - 2 if loss else 99, ledger.small)
    verbs = words.SUB_VERBS if loss else words.ADD_VERBS
    verb = rng.choice((*verbs, words.EAT) if loss and scene.things in words.FOODS else verbs)
    ledger.total = old - n if loss else old + n
    ledger.told.append(
        scene.say("{P} " + verb.told, n=n)
        + scene.say(", so {p} has {sum} {things}.", sum=_sum(old, "-" if loss else "+", n))
    )
    return scene.say(rng.choice(verb.asked), n=n), loss


def _boxes(ledger: Ledger, scene: _Scene, rng: random.Random) -> str:
    count, each, box = rng.randint(2, 9), rng.randint(2, 9), rng.choice(words.CONTAINERS)
    old, gain = ledger.total, count * each
    ledger.total = old + gain
    ledger.told.append(
        scene.say("The {box} hold {product} {things}, ", box=box, product=_sum(count, "*", each))
        + scene.say("so {p} has {sum} {things}.", sum=_sum(old, "+", gain))
    )
    return scene.say("buys {c} {box} with {e} {things} in each", c=count, box=box, e=each)


def _sum(a: int, op: str, b: int) -> str:
    result = {"+": a + b, "-": a - b, "*": a * b}[op]
    return f"{a} {op} {b} = {result}"


def _compare(rng: random.Random) -> Ledger:
    scene = _scene(rng)
    first = rng.randint(11, 120)
    fewer = rng.random() < 0.5
    n = operand(rng, first - 2 if fewer else 99)
    op, word = ("-", "fewer") if fewer else ("+", "more")
    second = first - n if fewer else first + n
    slots = {"n": n, "word": word, "first": first, "sum": _sum(first, op, n)}
    ledger = Ledger(second)
    ledger.asked += [
        scene.say("{name} has {first} {things}.", **slots),
        scene.say("{other} has {n} {word} {things} than {name}.", **slots),
    ]
    ledger.told += [
        scene.say("{name} has {first} {things}.", **slots),
        scene.say("{other} has {n} {word}, so {other} has {sum} {things}.", **slots),
    ]
    if rng.random() < 0.2:
        ledger.asked.append(scene.say("How many {things} does {other} have?"))
        return ledger
    ledger.total = first + second
    closing = rng.choice(("together", "together", "in total"))
    ledger.asked.append(scene.say("How many {things} do they have {closing}?", closing=closing))
    together = _sum(first, "+", second)
    ledger.told.append(scene.say("Together they have {sum} {things}.", sum=together))
    return ledger


def _shop(rng: random.Random) -> Ledger:
    scene = _scene(rng)
    count, price = rng.randint(2, 9), rng.randint(2, 9)
    cost = count * price
    money = cost + rng.randint(3, 80)
    boxed = rng.random() < 0.6
    box = rng.choice(words.CONTAINERS)
    goods = f"{box} of {scene.things}" if boxed else scene.things
    closing = rng.choice(("How many dollars are left?", "How many dollars does {p} have left?"))
    return Ledger(
        money - cost,
        [
            scene.say("{name} has {n} dollars.", n=money),
            scene.say("{P} buys {c} {goods} for {e} dollars each.", c=count, goods=goods, e=price),
            scene.say(closing),
        ],
        [
            scene.say("{name} has {n} dollars.", n=money),
            f"The {box if boxed else scene.things} cost {_sum(count, '*', price)} dollars.",
            scene.say("{P} has {sum} dollars left.", sum=_sum(money, "-", cost)),
        ],
    )


def _bus(rng: random.Random) -> Ledger:
    vehicle = rng.choice(words.VEHICLES)
    ledger = Ledger(rng.randint(11, 120))
    ledger.asked.append(f"There are {ledger.total} people on a {vehicle}.")
    ledger.told.append(f"There are {ledger.total} people.")
    for lead in ("At the next stop,", "Then")[: rng.choice((1, 1, 2))]:
        off = operand(rng, ledger.total - 2) if ledger.total >= 5 else 1
        on = operand(rng, MAX_TOTAL - ledger.total)
        stay = ledger.total - off
        ledger.asked.append(f"{lead} {off} people get off and {on} people get on.")
        ledger.told += [
            f"{off} get off, so there are {_sum(ledger.total, '-', off)} people.",
            f"{on} get on, so there are {_sum(stay, '+', on)} people.",
        ]
        ledger.total = stay + on
    ledger.asked.append(f"How many people are on the {vehicle} now?")
    return ledger


_SPOKEN = {"+": ("plus",), "-": ("minus",), "*": ("times",)}
_DIRECT_FORMS = (
    "What is {e}?", "What is {e}?", "What is {e}?", "Calculate {e}.", "How much is {e}?",
    "what is {e}", "What's {e}?", "{e}", "{e} =", "{e} = ?", "Please calculate {e}",
)  # fmt: skip


def _direct(rng: random.Random, small: bool = False) -> Ledger:
    product = rng.random() < 0.2
    ledger = Ledger(rng.randint(2, 9) if product else rng.randint(2, 12 if small else 150))
    expression = str(ledger.total)
    steps = 1 if small else rng.choice((1, 2)) if product else rng.choice((1, 2, 2, 3))
    for index in range(steps):
        old = ledger.total
        if product and index == 0:
            op, n = "*", rng.randint(2, 9)
        elif old > 160 or (old >= 5 and rng.random() < 0.5):
            op, n = "-", operand(rng, old, small)
        else:
            op, n = "+", operand(rng, small=small)
        ledger.total = {"+": old + n, "-": old - n, "*": old * n}[op]
        ledger.told.append(f"{_sum(old, op, n)}.")
        expression += f" {op} {n}"
    ledger.asked.append(_ask(expression, rng))
    return ledger


def _ask(expression: str, rng: random.Random) -> str:
    """One of the ways to type an expression: spaced, tight, or in words."""
    draw = rng.random()
    if draw < 0.15:
        expression = expression.replace(" ", "")
    elif draw < 0.3:
        for op, spoken in _SPOKEN.items():
            expression = expression.replace(op, rng.choice(spoken))
    return rng.choice(_DIRECT_FORMS).format(e=expression)


MAKERS: Final[dict[Kind, Callable[[random.Random], Ledger]]] = {
    "running": _running,
    "compare": _compare,
    "shop": _shop,
    "bus": _bus,
    "direct": _direct,
}
