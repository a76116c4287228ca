"""A request in flight: what its slot gained, turned into what its client gets.

Reads the slab, writes none of it. Knows no HTTP and no admission; where text goes is a sink's
business. The row is the buffer: a client that reads slowly is simply caught up with later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from trserve.errors import RequestError
from trserve.gateway.answer import ABORTED, Answer, Delta, failure
from trserve.gateway.metrics import Meter, Times
from trserve.gateway.model_links import ModelLinks
from trserve.gateway.responses import usage_dict
from trserve.gateway.slots import Slot
from trserve.ipc.annotations import AnnotationBook
from trserve.ipc.baton import BANK_SHIFT, FINISH_MASK, HOP_MASK, LENGTH_SHIFT, Baton, Finish, unpack
from trserve.ipc.extras import Extras, read_extras
from trserve.ipc.fence import load_fence
from trserve.ipc.slab import Slab

_FINISH_OR_HOP: Final = FINISH_MASK | HOP_MASK
_HOP_AND_BANK: Final = HOP_MASK | 1 << BANK_SHIFT
AT_A_TURN: Final = 64
"""So many of a prompt's annotations are read, named and encoded at once: some milliseconds."""


class Sink(Protocol):
    """Where an answer goes."""

    usage: Callable[[], dict[str, Any]]

    @property
    def plain(self) -> Callable[[str], None] | None:
        """What takes the text of a token, while nothing else need be said of it."""

    @property
    def paused(self) -> bool:
        """Whether the client reads too slowly to be given more now."""

    def take(self, delta: Delta) -> None:
        """What the answer gained; the last has a finish reason."""

    def fail(self, error: RequestError) -> None:
        """The request ended with an error; nothing follows."""


class Generation:
    """One slot's answer on its way to a client.

    Args:
        book: where the annotations of its tokens are, if it asked for them.
        scores_prompt: whether the prompt's are there too.
        degraded: tells whether a model that it might have visited is lost.
        links: what there is to say of models at other hosts, if there are any.
        meter: what measures it, if anything does.

    Attributes:
        handoffs: how often it moved so far.
        begun: the sink was given tokens.
        ended: nothing more will be given to the sink.
        end_reason: why, once it has: a finish reason, ``error``, or ``left`` for the client.
    """

    def __init__(
        self,
        *,
        slab: Slab,
        slot: Slot,
        prompt_tokens: int,
        seed: int,
        answer: Answer,
        sink: Sink,
        model_names: Sequence[str],
        book: AnnotationBook | None = None,
        scores_prompt: bool = False,
        degraded: Callable[[], bool] = bool,
        links: ModelLinks | None = None,
        meter: Meter | None = None,
    ) -> None:
        self._slab = slab
        self._position = prompt_tokens
        self._prompt_tokens = prompt_tokens
        self._seed = seed
        self._answer = answer
        self._is_plain = answer.is_plain
        self._sink = sink
        self._names = model_names
        self._book = book
        self._scores_prompt = scores_prompt
        self._next_score = 1  # the first token follows nothing
        sink.usage = self.usage
        self.handoffs = 0
        self._pending_ns = 0
        self._cached_tokens = 0
        self._degraded = degraded
        self._links = links
        self._meter = meter
        self._usage: dict[str, Any] | None = None
        self.slot = slot
        self.begun = False
        self.ended = False
        self.end_reason = ""

    def grow(self, word: int, token: int, source: int) -> bool:
        """:meth:`advance` for the usual ``word``: it covers one more token, the one that is given.

        False, and nothing, where it is not the usual one.
        """
        sink, position = self._sink, self._position + 1
        show = sink.plain
        if (
            show is None
            or word >> LENGTH_SHIFT != position
            or word & FINISH_MASK
            or not self._is_plain
            or self.ended
            or sink.paused
        ):
            return False
        self._position = position
        self.handoffs = word & HOP_MASK
        text = self._answer.push_one(token, source)
        if text:
            show(text)
        return True

    def advance(self, word: int) -> None:
        """Give the sink what ``word``, the slot's baton, covers beyond what it has."""
        if self.ended or self._sink.paused:
            return
        if not self.begun and word & _FINISH_OR_HOP == 0 and word >> LENGTH_SHIFT == self._position:
            return  # published, and its first worker is at the prompt
        baton = unpack(word)
        if self._scores_prompt and self._has_more_scores(baton):
            self._give_scores()
            return
        error = self._failure(word, baton)
        self._show(word, baton, Finish.NONE if error else baton.finish)
        if error is not None:
            self.fail(error)

    @property
    def wants_a_turn(self) -> bool:
        """Whether it was given a part of what there was, so that others have their turns."""
        began = self._scores_prompt and self._next_score > 1
        return began and not (self.ended or self._sink.paused)

    def _has_more_scores(self, baton: Baton) -> bool:
        """Whether the prompt is scored, and its annotations are too many to go with the tokens.

        Before anything is committed the whole prompt has been scored; only an abort may end it
        sooner.
        """
        if baton.length == self._position and baton.finish is Finish.NONE:
            return False
        assert self._book is not None
        return self._book.scored - self._next_score > AT_A_TURN

    def _give_scores(self) -> None:
        assert self._book is not None
        start, self._next_score = self._next_score, self._next_score + AT_A_TURN
        part = self._book.read(start, self._next_score)
        self._sink.take(Delta("", [], [], None, None, prompt_annotations=part))

    def conclude(self, word: int, error: RequestError) -> None:
        """End with ``error`` after what ``word`` covers, which may be a whole answer.

        Also where the sink is paused: there will be nothing to wait for.
        """
        if not self.ended:
            baton = unpack(word)
            failed = self._failure(word, baton) is not None
            self._show(word, baton, Finish.NONE if failed else baton.finish)
            self.fail(error)

    def _failure(self, word: int, baton: Baton) -> RequestError | None:
        barred = baton.finish is Finish.NUMERIC_ERROR and self._extras(word).empty
        error = failure(baton.finish, barred=barred)
        if baton.finish is Finish.WORKER_LOST and self._links is not None:
            error = self._links.failure(baton.owner) or error
        return error

    def _show(self, word: int, baton: Baton, finish: Finish) -> None:
        """Give the sink the tokens that are new, and the end if ``finish`` or they are one.

        Tokens that were committed before a failure come first: a stop string among them ended the
        answer before it happened.
        """
        row, start, end = self.slot.index, self._position, baton.length
        # While the slot is ours: usage may be asked for later. -1 where no worker has begun.
        self._cached_tokens = max(0, self._slab.cached[row])
        tokens = self._slab.tokens[row, start:end].tolist()
        sources = self._slab.source[row, start:end].tolist()
        self._position = end
        self.handoffs = baton.hop
        delta = self._answer.push(tokens, sources, finish)
        if tokens and not self.begun:
            self.begun = True
            if self._meter is not None:
                self._meter.begin()
        if delta.finish_reason is not None:
            self.ended = True
            self._pending_ns = self._extras(word).pending_ns
            degraded = self._degraded()  # a model that is lost later changes nothing
            self._degraded = lambda: degraded
            self._end(delta.finish_reason)
        if self._book is not None:
            delta = self._annotated(delta, start)
        if tokens or self.ended:
            self._sink.take(delta)

    def _annotated(self, delta: Delta, start: int) -> Delta:
        """``delta``, whose tokens stand from row position ``start`` on, with its annotations."""
        assert self._book is not None
        count = len(delta.token_ids)  # no overshoot
        delta = delta._replace(annotations=self._book.read(start, start + count))
        if not self._scores_prompt or not (count or self.ended):
            return delta
        self._scores_prompt = False
        rest = self._book.read(self._next_score, self._book.scored)
        return delta._replace(prompt_annotations=rest)

    def fail(self, error: RequestError) -> None:
        """End with ``error``."""
        if not self.ended:
            self.ended = True
            self._end("error")
            self._sink.fail(error)

    def break_off(self, error: RequestError) -> None:
        """A bug of ours: end with ``error``, also where the sink did not get the last delta."""
        if self.ended:
            self._answer.finish_reason = None  # the client was not told
            self._sink.fail(error)
        else:
            self.fail(error)

    def ask_abort(self) -> None:
        """Somebody wants it to end: an abort that comes is for this reason."""
        self._answer.abort_reason = ABORTED

    def abandon(self) -> None:
        """The client is gone: nothing more is given to anyone."""
        if not self.ended:
            self.ended = True
            self._end("abort")
            self.end_reason = "left"

    def let_go(self) -> None:
        """Its client has all there is: nobody asks its sink for the usage any more.

        A cycle of all that a request consists of would otherwise wait, prompt and all, for the
        collector, which takes longer over a request's objects than anything else does.
        """
        self._sink.usage = dict

    def _end(self, reason: str) -> None:
        """Have the end measured."""
        self.end_reason = reason
        if self._meter is not None:
            self._meter.end(reason, self.counts, self.handoffs)
            if reason in ("stop", "length"):
                pending_s = self._pending_ns / 1e9
                self._meter.complete(self._answer.num_tokens, self.handoffs, pending_s)

    @property
    def times(self) -> Times | None:
        """When it came to what; None where nothing measures it."""
        return None if self._meter is None else self._meter.times

    @property
    def finish_reason(self) -> str | None:
        """As the client was told; None while it grows, and where it was told nothing."""
        return self._answer.finish_reason

    @property
    def counts(self) -> Sequence[int]:
        """Tokens so far, by model."""
        return self._answer.counts

    @property
    def counted_length(self) -> int:
        """Length of the row up to what counts."""
        return self._prompt_tokens + self._answer.num_tokens

    def _extras(self, word: int) -> Extras:
        """The extras of the last hop, ``word``'s or a later, that is stable while they are read.

        A stop string can end an answer while the request still moves; only the bank that the word
        names before and after the read was left alone meanwhile.
        """
        while True:
            extras = read_extras(self._slab.extras(self.slot.index, word >> BANK_SHIFT & 1))
            load_fence()
            again = self._slab.baton[self.slot.index]
            if (again ^ word) & _HOP_AND_BANK == 0:
                return extras
            word = again

    def usage(self) -> dict[str, Any]:
        """The usage so far, as the response carries it; after the end the same for all who ask."""
        if self._usage is not None:
            return self._usage
        counts = self._answer.counts
        total = self._answer.num_tokens
        usage = usage_dict(
            self._prompt_tokens,
            total,
            {
                "tokens": dict(zip(self._names, counts, strict=True)),
                "handoffs": self.handoffs,
                "share": (total - counts[0]) / total if total else 0.0,
                "pending_ms": self._pending_ns / 1e6,
                "degraded": self._degraded(),
                "seed": self._seed,
            },
            self._cached_tokens,
        )
        if self.ended:
            self._usage = usage
        return usage
