"""An engine in a program whose workers are killed: its answers are what they would have been."""

from __future__ import annotations

import os
import signal
import time
from itertools import islice
from typing import Any

import pytest

from tests.faults.streams import LONG_S, kill_successors, worker_below
from trserve import Engine, EngineError
from trserve.offline.answers import Part

OPTIONS: dict[str, Any] = {"ignore_eos": True, "max_tokens": 500, "seed": 3}
PROMPTS = [[5 + n] * 6 for n in range(6)]


@pytest.fixture
def engine() -> Any:
    settings = {"dtype": "float32", "threads": (1, 1), "router_config": {"tau": 0.02}}
    with Engine(models=("tiny", "small"), **settings) as running:
        yield running


def kill(model: int) -> None:
    os.kill(worker_below(os.getpid(), model), signal.SIGKILL)


def written(parts: list[Part]) -> list[tuple[list[int], list[int]]]:
    """Tokens and sources of each answer."""
    answers: list[tuple[list[int], list[int]]] = [([], []) for _ in PROMPTS]
    for part in parts:
        answers[part.index][0].extend(part.token_ids)
        answers[part.index][1].extend(part.sources)
    return answers


@pytest.mark.parametrize("victims", [(0,), (1,), (0, 1)], ids=["slm", "llm", "both"])
def test_answers_survive_their_workers(engine: Engine, victims: tuple[int, ...]) -> None:
    expected = written(list(engine.stream(PROMPTS, **OPTIONS)))
    stream = engine.stream(PROMPTS, **OPTIONS)
    parts = list(islice(stream, 100))
    for model in victims:
        kill(model)
    parts += stream
    assert written(parts) == expected
    assert {part.finish_reason for part in parts} == {None, "length"}


def test_an_engine_whose_worker_keeps_dying_says_so(engine: Engine) -> None:
    began = time.monotonic()
    stream = engine.stream(PROMPTS, **OPTIONS | {"max_tokens": 900})
    next(stream)
    kill_successors(os.getpid(), 1, times=3)
    with pytest.raises(EngineError, match=r"worker 1 .*SIGKILL"):
        list(stream)
    assert time.monotonic() - began < LONG_S
    with pytest.raises(EngineError):
        engine.generate([5, 6], max_tokens=2)
