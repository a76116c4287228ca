"""What a request's grammar lets follow on its row: one matcher a request and worker.

A matcher is a function of the parameters and the row: it takes in committed tokens alone, those
that it has not seen, when the next token is about to be drawn. So a token that is discarded, or a
worker that is replaced, changes nothing, and a request that comes back costs its suffix.

Knows token ids and masks; nothing of logits, routers or how a token is then drawn. What a grammar
means is llguidance's (https://github.com/guidance-ai/llguidance), which is loaded for the first
request that has one.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from trserve.errors import RequestError
from trserve.grammar_limits import TimeBudget, new_matcher
from trserve.params import RequestParams, unpack_grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from trserve.gateway.tokenizer import Tokenizer
    from trserve.plan import ServerPlan

log = logging.getLogger(__name__)

_BoolArray = npt.NDArray[np.bool_]
_Int64Array = npt.NDArray[np.int64]

_KEPT: Final = 32
"""Grammars whose first state is kept: the choices of a request, and requests alike, share it."""

_LARGE: Final = 20_000
"""Ids of a vocabulary that takes a noticeable time to read."""

_WORD_BITS: Final = 32

_AT_ONCE: Final = 16
"""Tokens that are taken in between two looks at the clock."""


class Vocabulary:
    """The tokenizer as the library sees it.

    Args:
        eos_token_ids: ids that end an answer; they stand for no text, whatever the tokenizer says.

    Attributes:
        size: its number of ids.
    """

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Sequence[int]) -> None:
        from llguidance import LLTokenizer, TokenizerWrapper

        pieces, ends = tokenizer.token_bytes(), [t for t in eos_token_ids if t < tokenizer.size]
        assert pieces is not None and ends, "the gateway refuses grammars for such tokenizers"
        self.size = len(pieces)
        source = _Source(tokenizer, pieces, ends)
        source.library = self.library = LLTokenizer(TokenizerWrapper(source), eos_token=ends)
        self._words = np.zeros(-(-self.size // _WORD_BITS), np.int32)
        self._address = self._words.ctypes.data
        self._bytes = self._words.view(np.uint8)

    def forbidden(self, matcher: LLMatcher) -> _BoolArray:
        """Which ids cannot follow, bool [size]."""
        matcher.unsafe_compute_mask_ptr(self._address, self._words.nbytes)
        bits = np.unpackbits(~self._bytes, count=self.size, bitorder="little")
        return bits.view(np.bool_)


class _Source:
    """What the library asks of a tokenizer: the bytes of its ids, and ids for text that it forces.

    Where a grammar leaves no choice of text, the mask is the next token of its usual encoding. That
    must be made of these bytes: a tokenizer that puts a space before each text, or finds the name
    of a special token in it, writes others, and then the longest pieces that fit take its place.
    """

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, pieces: Sequence[bytes], ends: Sequence[int]) -> None:
        self.tokens = pieces
        self.eos_token_id = ends[0]
        self.special_token_ids = sorted(tokenizer.special_ids.union(ends))
        self.library: LLTokenizer | None = None
        self._tokenizer = tokenizer
        self._special = frozenset(self.special_token_ids)

    def __call__(self, text: bytes) -> list[int]:
        ids = self._encoded(text)
        if ids is None and self.library is not None:
            ids = self.library.greedy_tokenize(text.decode())
        return ids or []

    def _encoded(self, text: bytes) -> list[int] | None:
        try:
            ids = self._tokenizer.encode(text.decode(), add_special_tokens=False)
        except RequestError:  # no way to write it
            return None
        same = b"".join([self.tokens[token] for token in ids]) == text
        return ids if same and self._special.isdisjoint(ids) else None


class Constraint:
    """Where one request stands in its grammar.

    Args:
        matcher: as after ``prompt_len`` tokens of the row: before the first of the answer.
        end_ids: tokens that ``min_tokens`` keeps away; ``ignored`` are those that stay away after
            these too, because the request ignores them.
        budget: the time that it may take.

    Attributes:
        exhausted: the last call left nothing that may follow: the grammar is at a dead end, or
            could not be followed any more.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        matcher: LLMatcher,
        prompt_len: int,
        end_ids: Sequence[int],
        ignored: Sequence[int],
        budget: TimeBudget | None = None,
    ) -> None:
        self._vocabulary = vocabulary
        self._matcher = matcher
        self._seen = prompt_len
        self._end_ids = _known(end_ids, vocabulary.size)
        self._ignored = _known(ignored, vocabulary.size)
        self._budget = budget or TimeBudget()
        self._failed = False
        self.exhausted = False

    def forbidden(self, row: npt.NDArray[np.integer], *, is_short: bool) -> _BoolArray:
        """Which ids cannot follow ``row`` (all committed tokens), bool [vocabulary].

        An end is forbidden while the answer ``is_short`` or ignores it, unless nothing else can
        follow: a grammar that is through ends the answer. All ids are forbidden where the grammar
        was given up: by the library, which its limits make it do rather than take long, or
        because it took more than its time.
        """
        forbidden = self._followed(row)
        held = self._end_ids if is_short else self._ignored
        if len(held):
            before = forbidden[held]
            forbidden[held] = True
            if forbidden.all():
                forbidden[held] = before
        self.exhausted = bool(forbidden.all())
        return forbidden

    def _followed(self, row: npt.NDArray[np.integer]) -> _BoolArray:
        """As the grammar alone has it."""
        if not self._failed:
            self._budget.begin(len(row) - self._seen)
            forbidden = self._advance(row)
            self._budget.end()
            if forbidden is not None:
                return forbidden
        return np.ones(self._vocabulary.size, np.bool_)

    def _advance(self, row: npt.NDArray[np.integer]) -> _BoolArray | None:
        """Take ``row`` in; which ids cannot follow, or None if the grammar was given up."""
        matcher, overrun = self._matcher, self._budget.overrun
        reason = ""
        while self._seen < len(row) and not reason:
            end = min(self._seen + _AT_ONCE, len(row))
            matcher.consume_tokens(row[self._seen : end].tolist())
            self._seen = end
            reason = overrun()
        if not reason:
            forbidden = self._vocabulary.forbidden(matcher)
            reason = matcher.get_error() if matcher.is_error() else overrun()
            if not reason:
                return forbidden
        self._failed = True
        log.warning(
            "a request's grammar could not be followed at token %d of its row, and the request "
            "ends: %s",
            len(row),
            reason.partition("\n")[0],
        )
        return None


def _read_tokenizer(path: Path) -> Tokenizer:
    from trserve.gateway.tokenizer import Tokenizer

    return Tokenizer.load(path)


def create_grammars(plan: ServerPlan) -> Grammars:
    """Those of a worker; a large vocabulary, which takes a second or two, is read at once.

    Others would wait for it in the middle of their answers.
    """
    grammars = Grammars(lambda: _read_tokenizer(Path(plan.tokenizer_path)), plan.eos_token_ids)
    if plan.tokenizer_size > _LARGE and find_spec("llguidance") is not None:
        grammars.preload()
    return grammars


class Grammars:
    """Makes the constraints of a worker's requests.

    Args:
        read_tokenizer: reads the tokenizer of all models.
        eos_token_ids: the union over the models.
    """

    def __init__(
        self, read_tokenizer: Callable[[], Tokenizer], eos_token_ids: Sequence[int]
    ) -> None:
        self._read_tokenizer = read_tokenizer
        self._eos_token_ids = eos_token_ids
        self._vocabulary: Vocabulary | None = None
        self._first_states: OrderedDict[bytes, LLMatcher] = OrderedDict()

    def preload(self) -> None:
        """Read the vocabulary before anybody needs it, if any grammar can be followed on it."""
        tokenizer = self._read_tokenizer()
        if tokenizer.token_bytes() is not None and self._eos_token_ids:
            self._vocabulary = Vocabulary(tokenizer, self._eos_token_ids)

    def _known_vocabulary(self) -> Vocabulary:
        if self._vocabulary is None:
            self._vocabulary = Vocabulary(self._read_tokenizer(), self._eos_token_ids)
        return self._vocabulary

    def constraint(self, params: RequestParams, prompt_len: int) -> Constraint:
        """That of a request with a grammar, before the first token of its answer."""
        vocabulary, sampling = self._known_vocabulary(), params.sampling
        ends = sampling.eos_token_ids
        return Constraint(
            vocabulary,
            self._first_state(params.grammar, vocabulary).deep_copy(),
            prompt_len,
            ends + sampling.stop_token_ids,
            ends if sampling.ignore_eos else (),
        )

    def _first_state(self, grammar: bytes, vocabulary: Vocabulary) -> LLMatcher:
        states = self._first_states
        if grammar in states:
            states.move_to_end(grammar)
        else:
            states[grammar] = new_matcher(vocabulary.library, unpack_grammar(grammar))
            if len(states) > _KEPT:
                states.popitem(last=False)
        return states[grammar]


def _known(ids: Sequence[int], size: int) -> _Int64Array:
    known: Any = [token for token in set(ids) if token < size]
    return np.array(known, np.int64)
