"""The words of the demo grammar: names, things, verbs and places. Data only; knows no grammar."""

from __future__ import annotations

from typing import Final, NamedTuple


def listed(text: str) -> tuple[str, ...]:
    """The blank-separated words of ``text``."""
    return tuple(text.split())


HE: Final = "he"
SHE: Final = "she"

_HE_NAMES = listed(
    "Tom Ben Dan Omar Leo Max Sam Paul Ivan Hugo Noah Adam Luis Karl Finn Joel Amir Jack"
)
_SHE_NAMES = listed(
    "Eva Maya Ana Lucy Nina Rosa Emma Zoe Ida Clara Mia Sara Lena Ruth Alice Julia Vera Kate"
)
COMMON_NAMES: Final = tuple((n, HE) for n in _HE_NAMES) + tuple((n, SHE) for n in _SHE_NAMES)

RARE_NAMES: Final = listed(
    "Aaron Abdul Aisha Alan Albert Amanda Amelie Andrew Angela Anton Arjun Astrid Barbara "
    "Beatrice Bianca Boris Brian Camila Carlos Carmen Cecilia Charlotte Chen Chloe Conrad "
    "Daniela David Deepak Diego Dmitri Donna Edgar Eduardo Elena Emil Erik Esther Fatima "
    "Felix Fiona Frank Gabriel George Gloria Grace Gustav Hana Harriet Hassan Heidi Helga "
    "Ibrahim Ingrid Isabel Jamal James Jasmine Javier Jennifer Jorge Joshua Kamala Keiko "
    "Kenji Kevin Khalid Kofi Larissa Laura Lin Linda Louis Lukas Magnus Malik Margaret Maria "
    "Martin Matilda Michael Miriam Mohammed Nadia Natalie Nelson Nikolai Olga Oliver Olivia "
    "Oscar Pablo Patricia Pedro Philip Priya Quentin Rachel Rafael Raj Rebecca Ricardo Robert "
    "Roland Rupert Samira Sandra Sebastian Sergei Simon Sofia Stefan Susan Tamara Tariq Thomas "
    "Ulrich Ursula Valentina Victor Wanda Wei Wendy William Xavier Yasmin Yuki Yusuf Zachary"
)

FOODS: Final = listed("apples lemons cookies pears plums eggs oranges cherries candies muffins")
COMMON_THINGS: Final = (
    *FOODS,
    *listed(
        "pencils flowers books stickers marbles cards coins shells stamps toys buttons beads "
        "balloons stones"
    ),
)
RARE_THINGS: Final = listed(
    "acorns almonds badges bananas batteries bells blankets bolts bottles bracelets "
    "bricks brushes bulbs cakes cameras candles carrots chairs chickens chips clocks coconuts "
    "crayons cups dinosaurs dolls donuts ducks envelopes erasers feathers figs fish forks "
    "grapes hammers hats jackets jars keys kites ladders lamps leaves lollipops magnets "
    "mangoes masks melons mirrors mugs nails napkins necklaces needles notebooks nuts olives "
    "onions paintings pancakes peaches peanuts pebbles pens photos pillows pins plates "
    "postcards potatoes puzzles rabbits ribbons rings robots rocks roses rulers sandwiches scarves "
    "seeds sheep shirts shoes skittles socks spoons stars strawberries sweets tickets tiles "
    "tomatoes towels tractors tulips turnips umbrellas walnuts watches wheels whistles"
)
CONTAINERS: Final = listed("boxes bags packs baskets")
VEHICLES: Final = listed("bus boat train tram ferry")

ONSETS: Final = listed("b d f g h j k l m n p r s t v w z br ch dr fl gr kr pl sh st th tr")
VOWELS: Final = listed("a e i o u a e i o u ai ea oo ou")
CODAS: Final = ("", "", "", "n", "r", "l", "s", "m", "k", "t", "nd", "x")


class Verb(NamedTuple):
    """One action: how the question may say it (``{n}``, ``{other}``) and how the answer does."""

    asked: tuple[str, ...]
    told: str


ADD_VERBS: Final = (
    Verb(("buys {n} more", "buys {n}", "buys {n} more {things}"), "buys {n}"),
    Verb(("finds {n} more", "finds {n}", "finds {n} {things}"), "finds {n}"),
    Verb(("gets {n} more", "gets {n} from {other}", "gets {n}"), "gets {n}"),
    Verb(("receives {n} from {other}", "receives {n} more", "receives {n}"), "receives {n}"),
    Verb(("collects {n} more", "collects {n}"), "collects {n}"),
    Verb(("wins {n} more", "wins {n}"), "wins {n}"),
)
SUB_VERBS: Final = (
    Verb(
        ("gives away {n}", "gives {n} to {other}", "gives {n} {things} to {other}"),
        "gives away {n}",
    ),
    Verb(("loses {n}", "loses {n} of them"), "loses {n}"),
    Verb(("sells {n}", "sells {n} to {other}", "sells {n} of them"), "sells {n}"),
    Verb(("uses {n}", "uses {n} of them"), "uses {n}"),
    Verb(("drops {n}", "throws away {n}"), "drops {n}"),
)
EAT: Final = Verb(("eats {n}", "eats {n} of them", "eats {n} {things}"), "eats {n}")
CONNECTIVES: Final = ("Then {p}", "Later, {p}", "After that, {p}", "Next, {p}", "{P}", "{P}")
OPENINGS: Final = ("{name} has {n} {things}", "{name} starts with {n} {things}")
CLOSINGS: Final = (
    "How many {things} does {name} have now?",
    "How many {things} does {p} have now?",
    "How many {things} does {name} have in the end?",
)
CLOSING_AFTER_LOSS: Final = (
    "How many {things} are left?",
    "How many {things} does {name} have left?",
)
SYSTEM_MESSAGES: Final = (
    "You are a helpful assistant.",
    "You solve arithmetic word problems step by step.",
    "Be brief and exact.",
    "You are a careful math tutor. Think step by step.",
)
