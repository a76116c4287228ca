"""The map between two vocabularies, and rows that are put in another's order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.models.reference import Harness, make_model, save
from trserve.models.loading import load_model
from trserve.models.token_map import MapError, TokenMap, token_map
from trserve.workers.runner import TorchRunner

WORDS = [bytes([letter]) for letter in range(97, 107)]


@dataclass
class Words:
    """Ten ordinary tokens and then special ones; None is an id without a token."""

    special: Sequence[str | None]
    eos: tuple[int, ...] = ()
    bos_token_id: int | None = None
    ordinary: Sequence[bytes | None] = tuple(WORDS)

    @property
    def pieces(self) -> list[bytes | None]:
        return [*self.ordinary, *(t if t is None else t.encode() for t in self.special)]

    @property
    def size(self) -> int:
        return len(self.pieces)

    @property
    def added_ids(self) -> frozenset[int]:
        first = len(self.ordinary)
        return frozenset(first + i for i, token in enumerate(self.special) if token is not None)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self.eos


def placed(mapping: TokenMap, rows: Sequence[object]) -> list[object]:
    found = list(rows)
    for server, row in mapping.moved:
        found[server] = rows[row]
    return found


specials = st.permutations(["<a>", "<b>", "<c>", "<d>"])


@given(specials, specials, st.lists(st.just("<only there>"), max_size=1), st.integers(0, 3))
def test_tokens_of_one_text_have_one_id(
    first: list[str], other: list[str], further: list[str], at: int
) -> None:
    other = [*other[:at], *further, *other[at:]]
    ours, theirs = Words(first), Words(other)
    mapping = token_map(ours, theirs)
    rows = [*theirs.pieces, "padding"]
    served = placed(mapping, rows)
    assert served[: ours.size] == ours.pieces
    assert sorted(map(str, served)) == sorted(map(str, rows))
    assert not mapping.absent, "none but what is beyond the server's ids"
    ids = range(len(rows))
    assert [rows[row] for row in ids] == [served[own] for own in mapping.to_server(ids)]


def test_the_same_vocabulary_needs_no_map() -> None:
    assert not token_map(Words(["<a>", "<b>"]), Words(["<a>", "<b>"]))


def test_an_end_is_an_end_whatever_it_is_called() -> None:
    ours = Words(["<begin>", "<end>", "<x>"], eos=(11,), bos_token_id=10)
    theirs = Words(["</s>", "<s>", "<x>"], eos=(10,), bos_token_id=11)
    assert token_map(ours, theirs).moved == ((10, 11), (11, 10))


def test_an_id_without_a_token_is_never_drawn() -> None:
    """What the other model has there is a token that nobody here knows."""
    mapping = token_map(Words(["<a>", None, "<b>"]), Words(["<only there>", "<b>", "<a>"]))
    assert dict(mapping.moved) == {10: 12, 12: 11, 11: 10}
    assert mapping.absent == (11,)


def test_what_the_other_alone_has_is_never_drawn_where_it_stands() -> None:
    mapping = token_map(Words(["<a>", None, "<b>"]), Words(["<a>", "<only there>", "<b>"]))
    assert (mapping.moved, mapping.absent) == ((), (11,))
    mapping = token_map(Words(["<a>", None, "<b>"]), Words(["<b>", "<only there>", "<a>"]))
    assert (mapping.moved, mapping.absent) == (((10, 12), (12, 10)), (11,))


def test_an_end_takes_the_one_that_is_left() -> None:
    """The other's own end may stand anywhere among the first one's."""
    ours = Words(["</s>", "<done>"], eos=(10, 11))
    theirs = Words(["<|eot|>", "</s>"], eos=(10, 11))
    assert token_map(ours, theirs).moved == ((10, 11), (11, 10))


@pytest.mark.parametrize(
    ("special", "eos"),
    [
        (["</s>", "<|eot|>"], (11,)),
        (["</s>", "<|eot|>"], (10, 11)),
        (["<|eot|>", "</s>"], (10,)),
        (["<|eot|>", "</s>"], (11, 10)),
    ],
)
def test_an_end_that_only_the_other_has_is_refused(
    special: Sequence[str], eos: tuple[int, ...]
) -> None:
    """It would be masked, and the model could end in its own way no more."""
    with pytest.raises(MapError, match=r"'<\|eot\|>' ends a text.*\('</s>'\).*eos_token_id"):
        token_map(Words(["</s>"], eos=(10,)), Words(special, eos=eos))


@pytest.mark.parametrize(
    ("ours", "theirs", "message"),
    [
        (Words(["<a>"]), Words(["<b>"]), "it has no token for '<a>', which a prompt may hold"),
        (Words([f"<{i}>" for i in range(6)]), Words([]), "'<0>', '<1>', '<2>', '<3>' and 2 more"),
        (Words(["<a>"]), Words(["<a>"], ordinary=WORDS[::-1]), "id 0 is 'a' in one and 'j' in the"),
        (Words(["<a>"], ordinary=WORDS[:9]), Words(["<a>"]), "id 9 is '<a>' in one and 'j' in"),
        (Words([], ordinary=WORDS[:9]), Words([]), "id 9 is no token in one and 'j' in the other"),
    ],
)
def test_what_is_no_renumbering_is_refused(ours: Words, theirs: Words, message: str) -> None:
    with pytest.raises(MapError) as caught:
        token_map(ours, theirs)
    assert message in str(caught.value)


@pytest.mark.parametrize("case", ["qwen3-bias-tied", "qwen2"])
def test_a_mapped_model_is_the_model_in_other_ids(tmp_path, case):
    """Its logits at the server's ids are those of the checkpoint's rows; absent ones are none."""
    plain = Harness(save(make_model(case), tmp_path), tokenizer_size=90)
    order = list(range(96))
    Random(3).shuffle(order)
    moved = tuple((server, row) for server, row in enumerate(order) if server != row)
    mapped = Harness(tmp_path, tokenizer_size=90)
    decoder = load_model(
        tmp_path, mapped.spec, dtype=torch.float32, token_map=TokenMap(moved, absent=(5, 17))
    )
    mapped.runner = TorchRunner(decoder, mapped.kv, tokenizer_size=90)
    tokens = np.random.default_rng(0).integers(96, size=40).tolist()
    unmapped = Harness(tmp_path)
    own = unmapped.forward([([order[token] for token in tokens], 0, unmapped.table(40))])
    found = mapped.forward([(tokens, 0, mapped.table(40))])
    assert torch.equal(found.hidden, own.hidden)
    drawable = [token for token in range(90) if token not in (5, 17)]
    expected = own.logits[0, [order[token] for token in drawable]]
    assert torch.equal(found.logits[0, drawable], expected)
    assert found.logits[0, [5, 17, *range(90, 96)]].eq(-torch.inf).all()
    assert plain.runner.decoder.embedding.shape == decoder.embedding.shape
