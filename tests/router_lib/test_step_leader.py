"""The step leader: which tokens end a step, who writes what after one, and who begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from tests.router_lib.worlds import Decide, compare
from tests.workers.fakes import VOCAB
from trserve.router_lib.base import RouterContext
from trserve.router_lib.step_leader import StepLeader

ENDS = (".", "!", "?", "Ċ", '."', "Ċx", ".Ġ", "?)")
OTHERS = (".a", "a", "Ġ", '"', ",", "Ġ.x")
"""In the alphabet of byte-level tokenizers, where Ġ is a space and Ċ a line feed."""

TOKENS = [*ENDS, *OTHERS]
TOKENS += [f"w{n}" for n in range(VOCAB - len(TOKENS))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(TOKENS)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text("{}")
    return path


def leads(row: list[int], prompt_len: int, tokens: int) -> bool:
    """Whether the token after ``row`` is the leader's, counted from the end of the last step."""
    count = 0
    for token in row[prompt_len:]:
        count = 0 if token < len(ENDS) else count + 1
    return count < tokens


def rule(tokens: int) -> Any:
    def for_request(seed: int, prompt_len: int) -> Decide:
        return lambda model, row: int(leads(list(row), prompt_len, tokens) != bool(model))

    return for_request


def test_which_tokens_end_a_step(folder: Path) -> None:
    context = RouterContext(0, ("a", "b"), VOCAB, {"tokenizer": str(folder)})
    found = StepLeader(context)._ends
    assert [TOKENS[i] for i in range(VOCAB) if found[i]] == list(ENDS)


@pytest.mark.parametrize("tokens", [0, 1, 2, 5, 100])
def test_the_leader_begins_every_step(folder: Path, tokens: int) -> None:
    config = {"tokens": float(tokens), "tokenizer": str(folder)}

    def first(seed: int, prompt_len: int) -> int:
        return int(tokens > 0)

    keep: Any = lambda model, row: 1  # noqa: E731
    outcomes = compare(StepLeader, config, rule(tokens), keeps=keep, admit=first)
    sources = {source for outcome in outcomes for source in outcome.sources}
    assert sources == {0: {0}, 100: {1}}.get(tokens, {0, 1})
    other = config | {"tokens": 3.0}
    own = {"tokens": float(tokens)}
    assert outcomes == compare(StepLeader, other, rule(tokens), keeps=keep, admit=first, own=own)


def test_a_request_that_names_its_entry_model_is_led_from_the_second_token_on(
    folder: Path,
) -> None:
    config = {"tokens": 3.0, "tokenizer": str(folder)}
    keep: Any = lambda model, row: 1  # noqa: E731
    outcomes = compare(StepLeader, config, rule(3), keeps=keep, entry=0)
    assert all(outcome.sources[0] == 0 for outcome in outcomes)
    assert any(outcome.sources[1] == 1 for outcome in outcomes)
