"""What the demo pair says when it is not given a problem: greetings, thanks, refusals.

Each topic has one fixed reply and many ways for a person to get there. Knows no arithmetic.
"""

from __future__ import annotations

import random
from typing import Final, NamedTuple

from trserve.demo import words

CAN_DO: Final = "I can solve short arithmetic word problems."
REFUSAL: Final = "I can only solve short arithmetic word problems with small whole numbers."

FIRST_PHRASINGS: Final = 6
"""How many of a topic's phrasings, the most usual, count as first words."""


class Topic(NamedTuple):
    """One kind of small talk: its share, its only reply, and the phrasings that lead to it."""

    weight: float
    reply: str
    phrasings: tuple[str, ...]


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split("|"))


_GREETINGS = _split(
    "Hello!|Hi!|Hey!|Hello|Hi|Hello there!|Hi there!|Hey there|Good morning!|Good afternoon!|"
    "Good evening!|Good day!|Hello {name}!|Hi {name}|Hello, can you help me?|Hi, I am {name}.|"
    "Hello, my name is {name}.|Greetings!|Howdy|Yo|Hiya!|Hey, is anyone there?|Hello world|Hallo|"
    "Hi, how is it going?|Hello again!|Nice to meet you!|Hey, what's up?|Hello, are you there?|Test"
)
_IDENTITY = _split(
    "Who are you?|What are you?|What is your name?|What's your name?|Tell me about yourself.|"
    "Are you human?|Are you a robot?|Are you an AI?|Which model are you?|What model is this?|"
    "Are you ChatGPT?|Who made you?|Who built you?|Who am I talking to?|Introduce yourself.|"
    "How do you work?|Is this a language model?|What is this?|And who are you?|"
    "Hi, who are you?|Hello! What are you?|What kind of model are you?"
)
_ABILITY = _split(
    "What can you do?|What can you do for me?|Help|Help me|Help!|How can you help me?|"
    "What are you good at?|What do you know?|What can I ask you?|What should I ask?|"
    "Give me an example.|Show me an example.|What do you do?|What are you able to do?|"
    "What kind of problems can you solve?|Can you help me?|Can you do math?|Do you know math?|"
    "Can you count?|Hello, what can you do?|Hi, what can you do?|How do I use you?|"
    "What sort of questions can you answer?|Can you solve a problem for me?"
)
_FEELING = _split(
    "How are you?|How are you doing?|How are you today?|How do you feel?|Are you well?|"
    "Hello, how are you?|Hi! How are you?|How is your day?|How's it going?|Are you okay?"
)
_THANKS = _split(
    "Thanks!|Thank you!|Thank you very much!|Thanks a lot!|Thanks|Thank you so much.|"
    "Great, thanks!|Thx|Many thanks!|Thanks, that helps.|Great!|Well done!|Nice!|"
    "Good job!|Perfect, thank you.|Cool|That is right.|Thanks for your help!|"
    "Awesome, thanks|I appreciate it.|Ok thanks|Good"
)
_BYE = _split(
    "Bye!|Goodbye!|Bye bye|See you!|See you later.|Good night!|See you tomorrow!|Farewell!|"
    "I have to go.|That is all.|Bye|Thanks, bye!|Have a nice day!|Take care!|Ciao|Until next time"
)
_OFF_TOPIC = _split(
    "Tell me a joke.|Tell me a story.|Tell me a story about {noun}.|"
    "Tell me something about {noun}.|Tell me a joke about {noun}.|Sing a song.|"
    "Sing me a song about {noun}.|Write a poem.|Write a poem about {noun}.|"
    "Write an essay about {noun}.|Write a letter to {name}.|"
    "Write a short story about {name} and {noun}.|What is the capital of {place}?|"
    "What is the capital city of {place}?|Where is {place}?|How big is {place}?|"
    "What language do people speak in {place}?|Who is the president of {place}?|"
    "How many people live in {place}?|What is the weather like in {place}?|"
    "What is the weather today?|Will it rain tomorrow?|What time is it?|What day is it today?|"
    "Who wrote {noun}?|Who is {name}?|Who was {name} {word}?|Who invented {noun}?|"
    "Who discovered {noun}?|What is {noun}?|What are {noun}?|What is a {word}?|"
    "What does {word} mean?|Explain {noun}.|Explain {noun} to me.|Explain how {noun} work.|"
    "How do I cook {noun}?|How do I make {noun}?|How do I get to {place}?|How do {noun} work?|"
    "Why is the sky blue?|Why are {noun} so {word}?|Why do {noun} {word}?|Do you like {noun}?|"
    "Do you love me?|Do you know {name}?|What do you think about {noun}?|"
    "What is your favorite {word}?|What is the meaning of life?|Translate {word} into {place}.|"
    "Translate this text to French.|Write a Python function that sorts a list.|"
    "Write some code for {noun}.|Fix my code.|Write a program about {noun}.|def f(x): return x|"
    "Summarize this article about {noun}.|Recommend a book about {noun}.|Recommend a film.|"
    "What is the best film of all time?|Which is better, {noun} or {noun}?|"
    "Give me a recipe for {noun}.|Give me a list of {noun}.|Name a {word}.|Name some {noun}.|"
    "List {digit} facts about {noun}.|Tell me {digit} facts about {place}.|"
    "Give me {digit} ideas for {noun}.|What happened in 1{digit}{digit}{digit}?|"
    "What year was {name} born?|How old are you?|How old is {name}?|How tall is {name}?|"
    "How far is {place}?|When did the war end?|When was {place} founded?|I like {noun}.|"
    "I am sad.|I am bored.|I am hungry.|I love you.|You are {word}.|I hate {noun}.|"
    "My name is {name}.|Lorem ipsum {word} {word}|{word} {word} {word}|{word}|{word} {word}|{noun}|"
    "{name}|Let's talk about {noun}.|Can you write {noun}?|Can you speak {word}?|Play {word}.|"
    "Where can I buy {noun}?|Where do {noun} live?|Is {place} a country?|Are {noun} {word}?|"
    "What is 1{digit}{digit}{digit}{digit} * {digit}{digit}{digit}?|"
    "What is 2{digit}{digit}{digit} + 4{digit}{digit}{digit}?|What is {digit}{digit} / {digit}?|"
    "Solve x + {digit} = 1{digit}.|What is the square root of {digit}{digit}?|"
    "Integrate x.|Prove it.|Yes|No|Why?|Ok|Really?|What?|Please|asdf|???|..."
)
_PLACES = words.listed(
    "France Germany Italy Spain Japan China India Brazil Peru Egypt Kenya Canada Mexico Norway "
    "Sweden Poland Greece Turkey Iran Chile Cuba Australia Russia England Paris London Berlin "
    "Madrid Tokyo Rome Moscow Cairo Lima Oslo Vienna Africa Europe Asia America Portugal Austria"
)
_NOUNS = words.listed(
    "cats dogs love music history moon sun sea stars cat dog trees birds physics biology football "
    "chess art universe dragons computers politics money soup bread rice pasta pizza coffee tea "
    "horses war peace time water fire quantum mechanics"
) + _split(
    "black holes|the internet|Hamlet|the telephone|machine learning|my family|a princess|robots|"
    "electricity|penicillin|relativity|the weather|spring|winter|good movies"
)

TOPICS: Final = (
    Topic(3.0, f"Hello! {CAN_DO} What would you like to work out?", _GREETINGS),
    Topic(
        2.0,
        f"I am a demo of two small language models that write each answer together. {CAN_DO}",
        _IDENTITY,
    ),
    Topic(
        2.0,
        f"{CAN_DO} For example: Tom has 12 apples. He buys 7 more. "
        "How many apples does Tom have now?",
        _ABILITY,
    ),
    Topic(1.0, "I am fine, thank you! Do you have a problem for me to solve?", _FEELING),
    Topic(1.5, "You are welcome! Do you have another problem for me?", _THANKS),
    Topic(1.0, "Goodbye! Come back with another problem any time.", _BYE),
    Topic(6.0, REFUSAL, _OFF_TOPIC),
)
_WEIGHTS = tuple(topic.weight for topic in TOPICS)


def pseudo_word(rng: random.Random) -> str:
    """A pronounceable lower-case word of one to three syllables that means nothing."""
    syllables = rng.choice((1, 2, 2, 2, 3))
    body = "".join(rng.choice(words.ONSETS) + rng.choice(words.VOWELS) for _ in range(syllables))
    return body + rng.choice(words.CODAS)


def small_talk(rng: random.Random) -> tuple[str, str]:
    """A ``(message, reply)`` pair, the message in one of many casings and punctuations."""
    topic = rng.choices(TOPICS, _WEIGHTS)[0]
    return _restyle(_fill(rng.choice(topic.phrasings), rng), rng), topic.reply


def first_words(rng: random.Random) -> tuple[str, str]:
    """A greeting, thanks or question about the model itself; never off topic."""
    topic = rng.choice(TOPICS[:-1])
    return _restyle(_fill(rng.choice(topic.phrasings[:FIRST_PHRASINGS]), rng), rng), topic.reply


def _fill(phrasing: str, rng: random.Random) -> str:
    """Replaces each slot by a word of its own draw."""
    while "{" in phrasing:
        start, end = phrasing.index("{"), phrasing.index("}")
        filler = _filler(phrasing[start + 1 : end], rng)
        phrasing = phrasing[:start] + filler + phrasing[end + 1 :]
    return phrasing


def _filler(slot: str, rng: random.Random) -> str:
    match slot:
        case "digit":
            return str(rng.randint(1, 9))
        case "name":
            return rng.choice(words.RARE_NAMES)
        case "place":
            return rng.choice(_PLACES)
        case "word":
            return pseudo_word(rng) if rng.random() < 0.6 else rng.choice(_NOUNS)
    return rng.choice(_NOUNS if rng.random() < 0.6 else words.RARE_THINGS)


def _restyle(message: str, rng: random.Random) -> str:
    """As typed by someone in a hurry: lower case, no final mark, or another final mark."""
    if rng.random() < 0.35:
        message = message.lower()
    draw = rng.random()
    if draw < 0.25 and len(message) > 3:
        message = message.rstrip("?!.")
    elif draw < 0.35:
        message = message.rstrip("?!.") + rng.choice((".", "!", "?", "!!", " :)", "..."))
    if rng.random() < 0.06:
        message = rng.choice(("Please: ", "Hi! ", "Hello, ", "Ok. ", "So, ")) + message
    return message or "?"
