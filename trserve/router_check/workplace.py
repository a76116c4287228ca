"""All workers of a server in one process, played in turn: the real table, step and router.

For checking routers on models so small that processes would cost more than the steps. What it
plays is what a worker's loop does in one iteration; gates and waiting are left out, because a
worker that has nothing to run costs a turn nothing here. Knows no router in particular.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from trserve.gateway.slots import Slot, SlotTable
from trserve.ipc.baton import Finish, SlotState, unpack
from trserve.ipc.doorbell import create_doorbell
from trserve.ipc.layout import Layout
from trserve.ipc.links import ShmMedium, open_outbox, receivers
from trserve.ipc.rings import Kind
from trserve.ipc.slab import Slab, create_slab_file
from trserve.ipc.tally import TallyWriter
from trserve.models.decoder import Decoder
from trserve.models.loading import load_model
from trserve.models.spec import ModelSpec, read_spec
from trserve.params import RequestParams, encode_params
from trserve.plan import ServerPlan
from trserve.workers.blocks import BlockPool
from trserve.workers.kv_cache import KVCache
from trserve.workers.routing import Routing
from trserve.workers.runner import TorchRunner
from trserve.workers.sampler import Sampler
from trserve.workers.step import StepInputs
from trserve.workers.step_cycle import StepCycle, StepLimits
from trserve.workers.table import RequestTable

_BLOCK: Final = 16
_MAX_TOKENS: Final = 2048
_TURNS_PER_TOKEN: Final = 4
"""Two hops in a row never both commit nothing, so a token takes three turns of a worker at most."""


@dataclass(frozen=True)
class Model:
    """A model in memory; steps read it, so that all workplaces can share it."""

    decoder: Decoder
    spec: ModelSpec
    dtype: torch.dtype


def load_models(plan: ServerPlan) -> list[Model]:
    """The models of ``plan``. Raises ModelUnavailableError."""
    found = []
    for model in plan.models:
        path, dtype = Path(model.path), getattr(torch, model.dtype)
        spec = read_spec(path)
        decoder = load_model(
            path, spec, dtype=dtype, load_format=model.load_format, token_map=model.token_map
        )
        found.append(Model(decoder, spec, dtype))
    return found


@dataclass(frozen=True)
class Asked:
    """One request; ``limit`` is the longest that its row may get."""

    prompt: Sequence[int]
    params: RequestParams
    limit: int
    entry: int = 0


@dataclass(frozen=True)
class Answer:
    """How one ended: its output, who wrote each token, and in how many hops."""

    tokens: tuple[int, ...]
    sources: tuple[int, ...]
    finish: Finish
    hops: int


class NoEndError(Exception):
    """Requests did not end; ``unfinished`` are their indices."""

    def __init__(self, unfinished: Sequence[int], turns: int) -> None:
        super().__init__(f"{len(unfinished)} requests did not end in {turns} turns")
        self.unfinished = tuple(unfinished)
        self.turns = turns


class Workplace:
    """A slab with its workers; made for one run of at most ``slots`` requests."""

    def __init__(
        self,
        plan: ServerPlan,
        models: Sequence[Model],
        routings: Sequence[Routing],
        *,
        layout: Layout,
        slab_fd: int,
        bells: Sequence[int],
    ) -> None:
        self._slab = Slab(slab_fd, layout, create=True)
        self._slots = SlotTable(self._slab, open_outbox(self._slab, bells, layout.gateway))
        self._workers = [
            _Worker(plan, model, routing, Slab(slab_fd, layout), bells, index)
            for index, (model, routing) in enumerate(zip(models, routings, strict=True))
        ]

    def run(
        self, asked: Sequence[Asked], between: Callable[[int], None] = lambda turn: None
    ) -> list[Answer]:
        """Answer all of ``asked`` together; ``between`` is called before each turn.

        Raises:
            NoEndError: some go on although they had turns enough.
        """
        slots = [
            self._slots.publish(
                each.prompt, encode_params(each.params), limit=each.limit, entry=each.entry
            )
            for each in asked
        ]
        longest = max(each.limit - len(each.prompt) for each in asked)
        turns = _TURNS_PER_TOKEN * (longest + 2)
        with torch.inference_mode():
            for turn in range(turns):
                between(turn)
                for worker in self._workers:
                    worker.turn()
                if all(map(self._done, slots)):
                    return [self._answer(slot) for slot in slots]
        raise NoEndError([i for i, slot in enumerate(slots) if not self._done(slot)], turns)

    def _done(self, slot: Slot) -> bool:
        return unpack(self._slab.baton[slot.index]).state is SlotState.DONE

    def _answer(self, slot: Slot) -> Answer:
        baton, prompt = unpack(self._slab.baton[slot.index]), self._slab.prompt_len[slot.index]
        output = slice(prompt, baton.length)
        return Answer(
            tokens=tuple(self._slab.tokens[slot.index, output].tolist()),
            sources=tuple(self._slab.source[slot.index, output].tolist()),
            finish=baton.finish,
            hops=baton.hop,
        )


class _Worker:
    """One worker without its loop's waiting."""

    def __init__(
        self,
        plan: ServerPlan,
        model: Model,
        routing: Routing,
        slab: Slab,
        bells: Sequence[int],
        index: int,
    ) -> None:
        layout = slab.layout
        blocks = layout.slots * -(-layout.row_tokens // _BLOCK)
        self._rings = receivers(ShmMedium(slab), layout, index)
        self._outbox = open_outbox(slab, bells, index)
        self._table = RequestTable(slab, self._outbox, BlockPool(blocks, _BLOCK), index)
        kv = KVCache(model.spec, num_blocks=blocks, block_size=_BLOCK, dtype=model.dtype)
        runner = TorchRunner(model.decoder, kv, tokenizer_size=plan.tokenizer_size)
        if routing.router.reads_tap:
            runner.keep_tap()
        self._cycle = StepCycle(
            index=index,
            slab=slab,
            table=self._table,
            routing=routing,
            runner=runner,
            sampler=Sampler(index),
            inputs=StepInputs(
                max_tokens=_MAX_TOKENS,
                max_rows=layout.slots,
                max_blocks_per_row=self._table.blocks_per_row,
                block_size=_BLOCK,
            ),
            limits=StepLimits(layout.slots, _MAX_TOKENS),
            tally=TallyWriter(slab, index),
        )

    def turn(self) -> None:
        for ring in self._rings:
            for descriptor in ring.drain():
                if descriptor.kind is not Kind.PREFILL:
                    self._table.sync(descriptor.slot, descriptor.gen)
        self._cycle.run(0)
        self._outbox.flush()
        self._cycle.note()


@contextmanager
def workplace(
    plan: ServerPlan,
    models: Sequence[Model],
    routings: Sequence[Routing],
    *,
    slots: int,
    row_tokens: int,
) -> Iterator[Workplace]:
    """A workplace, and an end to its memory and descriptors."""
    layout = Layout(slots=slots, row_tokens=row_tokens, workers=len(models))
    fds = [create_slab_file(layout), *(create_doorbell() for _ in range(len(models) + 1))]
    try:
        yield Workplace(plan, models, routings, layout=layout, slab_fd=fds[0], bells=fds[1:])
    finally:
        for fd in fds:
            os.close(fd)
