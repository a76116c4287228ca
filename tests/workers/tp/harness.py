"""A model that several ranks compute, in threads of this process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tests.models.reference import Harness
from tests.serverproc import wait_until
from tests.workers.tp.groups import WAIT_S, Group
from trserve.models.sharding import connect
from trserve.models.token_map import TokenMap
from trserve.plan import ModelPlan
from trserve.workers.kv_cache import KVCache
from trserve.workers.tp.joining import load_share
from trserve.workers.tp.runner import RankRunner, TensorParallelRunner, follow


def model_plan(path: Path, tp: int, **changes: object) -> ModelPlan:
    fields = {"name": "m", "path": str(path), "dtype": "float32", "max_model_len": 512}
    return ModelPlan(**{**fields, "tp": tp, "token_map": TokenMap(), **changes})


class TpHarness(Harness):
    """A :class:`Harness` whose model is computed by several ranks; the others follow in threads.

    ``hidden`` holds what each of them computed in the last step.
    """

    def __init__(self, path: Path, tp: int, **options):
        int8 = options.pop("int8", False)
        super().__init__(path, **options)
        dtype = str(self.kv.dtype).removeprefix("torch.")
        model = model_plan(path, tp, int8=int8, dtype=dtype)
        size = self.kv.block_size
        width = self.step.block_tables.shape[1]
        self.group = Group(tp, max_tokens=1024, max_rows=64, width=width)
        self.hidden: dict[int, np.ndarray] = {}
        runners = []
        for rank in range(tp):
            decoder, torch_dtype = load_share(model, rank)
            sums = self.group.sums(rank)
            connect(decoder, sums)
            blocks = self.kv.num_blocks
            kv = KVCache(decoder.spec, num_blocks=blocks, block_size=size, dtype=torch_dtype)
            runners.append((decoder, kv, sums))
        decoder, kv, sums = runners[0]
        self.runner = TensorParallelRunner(
            decoder,
            kv,
            tokenizer_size=self.spec.vocab_size,
            group=sums,
            writer=self.group.writer(),
        )
        self._threads = [
            threading.Thread(target=self._follow, args=(rank, *runners[rank][:2]))
            for rank in range(1, tp)
        ]
        for thread in self._threads:
            thread.start()

    def _follow(self, rank, decoder, kv):
        runner = RankRunner(decoder, kv)
        forward = runner.forward

        def keeping(*plan):
            self.hidden[rank] = forward(*plan).numpy().copy()
            return self.hidden[rank]

        runner.forward = keeping
        follow(self.group.memories[rank], self.group.reader(rank, self.kv.block_size), runner)

    def until_all_are_done(self):
        """Rank 0 has its results before the others have left the step."""
        words, memory = self.group.memories[0].words, self.group.memories[0]
        ranks = range(1, memory.layout.ranks)
        done = wait_until(
            lambda: min(words[memory.done_at(rank)] for rank in ranks),
            lambda least: least == words[memory.published_at],
            WAIT_S,
        )
        assert done == words[memory.published_at]

    def close(self):
        self.runner.close()
        for thread in self._threads:
            thread.join(WAIT_S)
            assert not thread.is_alive(), "a rank does not leave"
        self.group.close()


@contextlib.contextmanager
def tp_harness(path: Path, tp: int, **options) -> Iterator[TpHarness]:
    harness = TpHarness(path, tp, **options)
    try:
        yield harness
    finally:
        harness.close()
