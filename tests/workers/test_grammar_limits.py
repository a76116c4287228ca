"""What a grammar may cost others: steps, and the prefix cache; for more see ``test_grammar``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLMatcher

from tests.workers.fakes import EOS, VOCAB, HashRunner, world
from tests.workers.test_grammar import (
    LIMIT,
    PIECES,
    PROMPT,
    Letters,
    grammar,
    new_grammars,
)
from trserve.errors import RequestError
from trserve.grammar_limits import CALL_S, MEAN_S, TOKEN_S, TimeBudget, new_matcher
from trserve.ipc.baton import Finish
from trserve.ipc.extras import read_extras
from trserve.params import unpack_grammar
from trserve.workers.grammar import Constraint, Vocabulary

DEAD_END = 'start: "a" A | "b" A\nA: /0/ & /1/'
AMBIGUOUS = 'start: x\nx: x x | x x x | x x x x | x x x x x | x x x x x x | "a" | '


@pytest.mark.parametrize("fault", ["dead end", "logits"])
def test_a_grammar_without_a_way_out_costs_nobody_the_prefix_cache(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits that are not finite do, whether the request has a grammar or not."""
    forgotten: list[int] = []
    if fault == "logits":
        nan = lambda self, hidden: torch.full((len(hidden), VOCAB), torch.nan)  # noqa: E731
        monkeypatch.setattr(HashRunner, "logits", nan)
    with world(workers=1, grammars=new_grammars(), row_tokens=128) as w:
        pool = w.workers[0].table.pool
        monkeypatch.setattr(pool, "forget_cached", lambda: forgotten.append(1))
        source = DEAD_END if fault == "dead end" else 'start: "ab"'
        slot = w.submit(PROMPT, limit=LIMIT, grammar=grammar("grammar", source))
        w.run(slot)
        baton = w.baton(slot)
        assert baton.finish is Finish.NUMERIC_ERROR
        assert len(forgotten) == (fault == "logits")
        extras = read_extras(w.slab.extras(slot.index, baton.bank))
        assert extras.empty == (fault == "dead end")


class Clock:
    """CPU time as a test has it."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Slow:
    """A matcher that takes time: for each token that it takes in, and for each mask."""

    def __init__(self, matcher: LLMatcher, clock: Clock) -> None:
        self.matcher, self.clock = matcher, clock
        self.token_s = self.mask_s = 0.0
        self.num_consumed = self.num_masks = 0

    def consume_tokens(self, tokens: list[int]) -> bool:
        self.num_consumed += len(tokens)
        self.clock.now_s += self.token_s * len(tokens)
        return self.matcher.consume_tokens(tokens)

    def unsafe_compute_mask_ptr(self, address: int, size: int) -> None:
        self.num_masks += 1
        self.clock.now_s += self.mask_s
        self.matcher.unsafe_compute_mask_ptr(address, size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.matcher, name)


def slow_constraint(
    source: str, kind: str = "regex", letters: Letters | None = None
) -> tuple[Constraint, Slow]:
    vocabulary, clock = Vocabulary(letters or Letters(), (EOS,)), Clock()  # type: ignore[arg-type]
    slow: Any = Slow(new_matcher(vocabulary.library, unpack_grammar(grammar(kind, source))), clock)
    return Constraint(vocabulary, slow, 0, (), (), TimeBudget(clock)), slow


def is_followed(constraint: Constraint, tokens: Sequence[int]) -> bool:
    """Whether there is a mask after ``tokens`` that leaves something."""
    forbidden = constraint.forbidden(np.array(tokens, np.int32), is_short=False)
    assert constraint.exhausted == forbidden.all()
    return not constraint.exhausted


class Runs(Letters):
    """With an id for a run of letters, whose every prefix a mask looks at."""

    def token_bytes(self) -> list[bytes] | None:
        return [*PIECES[:-1], b"a" * 12]


def test_ambiguous_rules_end_by_what_the_parser_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast the machine is."""
    monkeypatch.setattr("trserve.grammar_limits.WRITTEN_ITEMS", 3000)
    constraint, slow = slow_constraint(AMBIGUOUS, "grammar", Runs())
    row: list[int] = []
    while is_followed(constraint, row) and len(row) < 40:
        row.append(PIECES.index(b"a"))
    assert 3 < len(row) < 40 and "Too many items (limit 3000" in slow.get_error()


def test_only_rules_that_a_client_wrote_have_the_narrow_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trserve.grammar_limits.WRITTEN_ITEMS", 1)
    with pytest.raises(RequestError, match=r"grammar cannot be followed: .*Too many items"):
        grammar("grammar", 'start: "a" b\nb: "b" b | "c"')
    for kind, source in (("json", "{}"), ("regex", "ab*"), ("choice", '["a", "b"]')):
        assert is_followed(slow_constraint(source, kind)[0], [])


def test_one_step_that_takes_too_long_ends_the_request(caplog: pytest.LogCaptureFixture) -> None:
    constraint, slow = slow_constraint("[01]*")
    slow.mask_s = CALL_S * 0.9
    assert is_followed(constraint, [])
    slow.mask_s = CALL_S * 1.1
    assert not is_followed(constraint, [0])
    assert "could not be followed at token 1 of its row" in caplog.text
    assert "it took 55 ms in one step" in caplog.text
    slow.mask_s, masks = 0.0, slow.num_masks
    assert not is_followed(constraint, [0])  # it is over, and costs nothing more
    assert slow.num_masks == masks and len(caplog.records) == 1


def test_steps_that_take_long_in_the_mean_end_the_request(caplog: pytest.LogCaptureFixture) -> None:
    constraint, slow = slow_constraint("[01]*")
    row: list[int] = []
    slow.mask_s = MEAN_S * 0.9
    for _ in range(100):
        assert is_followed(constraint, row)
        row.append(0)
    slow.mask_s = MEAN_S * 3
    begun = len(row)
    while is_followed(constraint, row) and len(row) < 200:
        row.append(0)
    assert 2 < len(row) - begun < 60
    assert "5 ms a token in the mean" in caplog.text


@pytest.mark.parametrize(("token_s", "is_fine"), [(TOKEN_S * 0.9, True), (TOKEN_S * 100, False)])
def test_a_worker_stops_to_catch_up_when_it_takes_too_long(token_s: float, is_fine: bool) -> None:
    constraint, slow = slow_constraint("[01]*")
    slow.token_s = token_s
    assert is_followed(constraint, [0] * 8000) == is_fine
    assert slow.num_consumed == 8000 if is_fine else slow.num_consumed < 200
