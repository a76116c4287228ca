"""Workers without weights: a model that is a hash, a router that is another, and their reference.

The model hashes what its KV cache holds under the row's block table, so that a block that is lost,
shared or stale changes the tokens. The reference is a plain loop over one request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from tests.ipc.memory import Memory, memory
from trserve.gateway.slots import Slot, SlotTable
from trserve.ipc.baton import Baton, Finish, SlotState, unpack
from trserve.ipc.layout import pages_for
from trserve.ipc.links import Medium, ShmMedium
from trserve.ipc.rings import Descriptor, Kind
from trserve.ipc.slab import Slab
from trserve.ipc.tally import TallyWriter
from trserve.params import RequestParams, SamplingParams, encode_params
from trserve.router_lib.base import BaseRouter, PeerReq, RequestView, RouterContext, StepResult
from trserve.sched.table import ThresholdTable
from trserve.workers.blocks import BlockPool
from trserve.workers.gating import WorkerGate
from trserve.workers.grammar import Grammars
from trserve.workers.routing import Routing
from trserve.workers.runner import ForwardOutput
from trserve.workers.sampler import Sampler
from trserve.workers.step import StepInputs
from trserve.workers.step_cycle import StepCycle, StepLimits
from trserve.workers.table import RequestTable

VOCAB = 64
EOS = 7
POISON = -2  # no token
BLOCK = 4

Token = Callable[[int, Sequence[int]], int]
Decide = Callable[[int, Sequence[int]], int]


def hash_token(model: int, row: Sequence[int]) -> int:
    """The token that ``model`` writes after ``row``."""
    return hash((model, *row)) % VOCAB


def stay(model: int, row: Sequence[int]) -> int:
    return 0


def hash_route(peers: int, share: int) -> Decide:
    """Leaves on ``share`` of 100 rows (with the sampled token), to any peer."""

    def decide(model: int, row: Sequence[int]) -> int:
        drawn = hash((99, model, *row))
        return 1 + drawn // 100 % peers if drawn % 100 < share else 0

    return decide


class HashRunner:
    """Implements the runner's ``forward`` over a KV cache of token ids.

    ``token`` may return -1 for logits that are not finite.
    """

    def __init__(self, model: int, pool: BlockPool, token: Token = hash_token) -> None:
        self.model = model
        self.token = token
        self.pool = pool
        self.size = pool.block_size
        self.kv = np.full(pool.num_blocks * self.size, -1)
        self.batches: list[list[int]] = []

    def forward(self, inputs: StepInputs, also: Any = None) -> ForwardOutput:
        self._check(inputs)
        return self._compute(inputs, also)

    def _check(self, inputs: StepInputs) -> None:
        slots = inputs.slots[: inputs.num_tokens]
        assert len(set(slots.tolist())) == len(slots), "two tokens in one place"
        written = set((slots // self.size).tolist())
        assert not any(map(self.pool.is_cached, written)), "others may read what is written"

    def _compute(self, inputs: StepInputs, also: Any) -> ForwardOutput:
        tokens, rows = inputs.num_tokens, inputs.num_rows
        self.kv[inputs.slots[:tokens]] = inputs.token_ids[:tokens]
        self.batches.append(np.diff(inputs.query_start[: rows + 1]).tolist())
        tokens_after = [
            self.token(self.model, self._held(inputs, row, int(inputs.kv_len[row])))
            for row in range(rows)
        ]
        further = None if also is None else self._hidden([self._after(inputs, at) for at in also])
        logits = self.logits(self._hidden(tokens_after))
        return ForwardOutput(logits=logits, hidden=torch.zeros(rows, 2), also=further)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(len(hidden), VOCAB)
        for row, token in enumerate(hidden[:, 0].int().tolist()):
            # The second choice is what a banned token leaves.
            logits[row, (token + 1) % VOCAB] = 1.0
            logits[row, token] = 2.0 if token >= 0 else torch.nan
        return logits

    def _hidden(self, tokens: Sequence[int]) -> torch.Tensor:
        return torch.tensor([[float(token), 0.0] for token in tokens])

    def _after(self, inputs: StepInputs, at: int) -> int:
        """What follows the step's token ``at``."""
        row = int(np.searchsorted(inputs.query_start[: inputs.num_rows + 1], at, "right")) - 1
        return self.token(self.model, self._held(inputs, row, int(inputs.positions[at]) + 1))

    def _held(self, inputs: StepInputs, row: int, length: int) -> list[int]:
        positions = np.arange(length)
        blocks = inputs.block_tables[row, positions // self.size]
        held: list[int] = self.kv[blocks * self.size + positions % self.size].tolist()
        return held


class SubmittingHashRunner(HashRunner):
    """Says that a device has its step, and computes it after that.

    Twice, as a GPU that found its inputs overwritten does. The step's arrays are to stay as they
    were, and until it is over nobody may rely on what it writes.
    """

    def __init__(self, model: int, pool: BlockPool, token: Token = hash_token) -> None:
        super().__init__(model, pool, token)
        self.on_submitted: Callable[[], None] = lambda: None
        self.on_waking: Callable[[], None] = lambda: None

    def forward(self, inputs: StepInputs, also: Any = None) -> ForwardOutput:
        self._check(inputs)
        self.kv[inputs.slots[: inputs.num_tokens]] = POISON
        before = self._arrays(inputs)
        for _ in range(2):
            self.on_submitted()
            self.on_waking()
        for array, was in zip(self._arrays(inputs), before, strict=True):
            assert (array == was).all()
        return self._compute(inputs, also)

    def _arrays(self, inputs: StepInputs) -> list[NDArray[np.integer]]:
        rows, tokens = inputs.num_rows, inputs.num_tokens
        of_tokens = [a[:tokens] for a in (inputs.token_ids, inputs.positions, inputs.slots)]
        of_rows = [a[:rows] for a in (inputs.kv_len, inputs.block_tables)]
        return [np.array([rows, tokens]), *(a.copy() for a in of_tokens + of_rows)]


class FakeRouter(BaseRouter):
    """Routes as ``decide`` says; its ``keeps`` decides about the token where it is not None."""

    decide: ClassVar[Decide] = staticmethod(stay)
    keeps: ClassVar[Decide | None] = None

    def route(self, result: StepResult) -> Any:
        return [type(self).decide(self.model, r.token_ids.tolist()) for r in result.requests]

    def send(self, req: RequestView, token: int) -> PeerReq:
        peer_req = super().send(req, token)
        keeps = type(self).keeps
        if keeps is not None:
            peer_req.keep_token = bool(keeps(self.model, req.token_ids.tolist()))
        return peer_req


class EarlyRouter(FakeRouter):
    """Decides by what is committed alone; ``columns`` are those of the logits that it was shown."""

    decides_early = True
    columns: ClassVar[list[int]] = []

    def route(self, result: StepResult) -> Any:
        type(self).columns.append(result.logits.shape[1])
        rows = [request.token_ids[: request.committed_len] for request in result.requests]
        return [type(self).decide(self.model, row.tolist()) for row in rows]


def router_class(
    decide: Decide, keeps: Decide | None = None, base: type[FakeRouter] = FakeRouter
) -> type[FakeRouter]:
    wrapped = None if keeps is None else staticmethod(keeps)
    own = {"decide": staticmethod(decide), "keeps": wrapped, "columns": []}
    return type("Router", (base,), own)


@dataclass(frozen=True)
class Outcome:
    """How a request ended: all of its row, who wrote each output token, why it is over."""

    row: list[int]
    sources: list[int]
    finish: Finish
    hops: int


def reference(
    prompt: Sequence[int],
    *,
    limit: int,
    models: int,
    decide: Decide,
    keeps: Decide | None = None,
    entry: int = 0,
    token: Token = hash_token,
    stop_ids: Sequence[int] = (EOS,),
) -> Outcome:
    """The outcome by a plain loop, from the rules of the protocol alone."""
    row, sources = list(prompt), list[int]()
    owner, hops, committed, arrived_empty = entry, 0, 0, False
    while True:
        new = token(owner, row)
        destination = decide(owner, [*row, new])
        keep = owner != 0 if keeps is None else bool(keeps(owner, [*row, new]))
        empty = not committed and not keep
        if empty and arrived_empty:
            destination = 0
        if not destination or keep:
            row.append(new)
            sources.append(owner)
            committed += 1
            if new in stop_ids:
                return Outcome(row, sources, Finish.STOP, hops)
            if len(row) >= limit:
                return Outcome(row, sources, Finish.LENGTH, hops)
        if destination:
            owner = [m for m in range(models) if m != owner][destination - 1]
            arrived_empty, committed, hops = empty, 0, hops + 1


class Worker:
    """One worker, played by hand: ``take_in``, ``step`` and ``publish`` are its loop's stages."""

    def __init__(self, world: World, index: int, slab: Slab) -> None:
        self.index = index
        self.slab = slab
        self.consumers = world.memory.consumers(slab, index)
        self.outbox = world.memory.outbox(slab, index)
        size = world.block_size
        self.pool = BlockPool(world.num_blocks, size, prefix_caching=world.prefix_caching)
        self.table = RequestTable(slab, self.outbox, self.pool, index)
        self.runner = world.runner(index, self.pool, world.token)
        names = tuple(f"m{model}" for model in range(world.memory.layout.workers))
        self.router = world.router(RouterContext(index, names, VOCAB, world.config))
        inputs = StepInputs(
            max_tokens=world.max_tokens,
            max_rows=world.max_rows,
            max_blocks_per_row=self.table.blocks_per_row,
            block_size=size,
        )
        self.tally = TallyWriter(slab, index)
        self.gate = WorkerGate(
            slab,
            index,
            world.memory.bells,
            thresholds=ThresholdTable.fixed(world.thresholds or (1,) * slab.layout.workers),
            max_rows=world.max_rows,
            max_wait_s=world.max_wait_s,
        )
        self.cycle = StepCycle(
            index=index,
            slab=slab,
            table=self.table,
            routing=Routing(self.router),
            runner=self.runner,  # type: ignore[arg-type]
            sampler=Sampler(index),
            inputs=inputs,
            limits=StepLimits(world.max_rows, world.max_tokens),
            tally=self.tally,
            early_prefill=world.early_prefill == "always",
            grammars=world.grammars,
        )

    def drain(self) -> list[Descriptor]:
        return [descriptor for ring in self.consumers for descriptor in ring.drain()]

    def take_in(self, descriptors: Sequence[Descriptor]) -> None:
        for descriptor in descriptors:
            hear = self.table.expect if descriptor.kind is Kind.PREFILL else self.table.sync
            hear(descriptor.slot, descriptor.gen)
        for request in self.table.cancelled():
            self.table.finish(request, Finish.ABORT)

    def turn(self, now_ns: int = 0) -> None:
        self.take_in(self.drain())
        self.cycle.run(now_ns)
        self.outbox.flush()
        self.cycle.note()
        self.check_blocks()

    def check_blocks(self) -> None:
        """The accounts add up, and what a cached block should hold is what it holds."""
        self.pool.check(self.table.resident.values())
        for block in filter(self.pool.is_cached, range(self.pool.num_blocks)):
            tokens = np.frombuffer(self.pool._cache._tokens[block], np.int32)
            size = self.pool.block_size
            assert (self.runner.kv[block * size : (block + 1) * size] == tokens).all()


@dataclass
class World:
    """Several workers and a gateway's slot table over one slab, all in this process."""

    memory: Memory
    router: type[BaseRouter] = FakeRouter
    token: Token = hash_token
    runner: type[HashRunner] = HashRunner
    num_blocks: int = 64
    block_size: int = BLOCK
    max_rows: int = 8
    max_tokens: int = 64
    config: Mapping[str, float] = field(default_factory=dict)
    prefix_caching: bool = True
    early_prefill: str = "off"
    thresholds: Sequence[int] = ()
    max_wait_s: float | None = None
    grammars: Grammars | None = None

    def __post_init__(self) -> None:
        slab = self.memory.slab()
        self.slab = slab
        self.slots = SlotTable(slab, self.memory.outbox(slab, self.memory.layout.gateway))
        self.workers = [self.create(w) for w in range(self.memory.layout.workers)]

    def create(self, index: int) -> Worker:
        return Worker(self, index, self.memory.slab())

    def submit(
        self,
        prompt: Sequence[int],
        *,
        limit: int,
        entry: int = 0,
        pinned: bool = False,
        admit: bool = True,
        router: Mapping[str, float] | None = None,
        tops: int | None = None,
        scores_prompt: bool = False,
        trace: bool = False,
        grammar: bytes = b"",
        **sampling: Any,
    ) -> Slot:
        settings = {"temperature": 0.0, "eos_token_ids": (EOS,)} | sampling
        params = RequestParams(
            sampling=SamplingParams(**settings),
            router=dict(router or {}),
            pinned=pinned,
            admit=admit,
            tops=tops,
            scores_prompt=scores_prompt,
            trace=trace,
            grammar=grammar,
        )
        records = limit - params.first_record(len(prompt))
        pages = pages_for(records, tops or 0) if params.annotated else 0
        blob = encode_params(params)
        others = [w.index for w in self.workers if w.index != entry]
        expecting = () if pinned or self.early_prefill == "off" else others
        return self.slots.publish(
            prompt, blob, limit=limit, entry=entry, pages=pages, expecting=expecting
        )

    def baton(self, slot: Slot) -> Baton:
        return unpack(self.slab.baton[slot.index])

    def outcome(self, slot: Slot) -> Outcome:
        baton, prompt = self.baton(slot), self.slab.prompt_len[slot.index]
        row = self.slab.tokens[slot.index, : baton.length].tolist()
        sources = self.slab.source[slot.index, prompt : baton.length].tolist()
        return Outcome(row, sources, baton.finish, baton.hop)

    def run(self, *slots: Slot, turns: int = 20_000) -> None:
        """Let the workers take turns until all ``slots`` are DONE."""
        for _ in range(turns):
            if all(self.baton(slot).state is SlotState.DONE for slot in slots):
                break
            for worker in self.workers:
                worker.turn()
        for worker in self.workers:  # the last DONE descriptors
            worker.turn()
        assert all(self.baton(slot).state is SlotState.DONE for slot in slots), "no end"

    def check_nothing_held(self) -> None:
        """All requests are closed everywhere, and nobody holds a block."""
        for worker in self.workers:
            assert worker.table.resident == {} and worker.table.runnable == {}
            worker.pool.check([])
            assert worker.pool.num_available == self.num_blocks
        for slot in range(self.memory.layout.slots):
            if unpack(self.slab.baton[slot]).state is SlotState.DONE:
                for index, closed in enumerate(self.slab.closed):
                    if self.slab.sent[slot] >> index & 1:
                        assert closed[slot] == self.slab.gen[slot]


@contextmanager
def world(
    *,
    slots: int = 4,
    row_tokens: int = 64,
    workers: int = 2,
    medium: Callable[[Slab], Medium] = ShmMedium,
    **settings: Any,
) -> Iterator[World]:
    with memory(slots=slots, row_tokens=row_tokens, workers=workers) as shared:
        shared.medium = medium
        yield World(shared, **settings)
