"""The forward pass of a model that several processes share: rank 0's runner, and the others'.

Rank 0 is the worker. It publishes each step's plan, then computes its share of the step as every
other rank does, and alone has the head, the logits and whatever follows. Both sides are the plain
runner around a decoder that adds up (``models.sharding``). Compiled kernels are left out: they run
a step in one call and cannot wait for another rank within it.

Knows decoders, plans and collectives; nothing of requests, of sockets or of how a share is loaded.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from trserve.models.attention import PagedAttention
from trserve.models.decoder import Decoder
from trserve.models.sharding import Collective
from trserve.workers.kv_cache import KVCache
from trserve.workers.runner import ForwardOutput, TorchRunner
from trserve.workers.step import StepInputs
from trserve.workers.tp.memory import GroupMemory, Trouble
from trserve.workers.tp.plan_ring import PlanReader, PlanWriter


class TensorParallelRunner(TorchRunner):
    """Rank 0's runner.

    Args:
        decoder: rank 0's share, connected to ``group``.
        kv: the cache of this share's KV heads; all ranks' have the same blocks.
        writer: tells the others of each step.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv: KVCache,
        *,
        tokenizer_size: int,
        group: Collective,
        writer: PlanWriter,
    ) -> None:
        super().__init__(decoder, kv, tokenizer_size=tokenizer_size)
        self._group, self._writer = group, writer

    def forward(self, step: StepInputs, also: NDArray[np.int64] | None = None) -> ForwardOutput:
        """Compute ``step`` on all ranks; see :class:`TorchRunner`.

        Raises:
            GroupLostError: another rank is gone or hangs.
        """
        self._writer.tell(step, also)
        return self._forward(step, also)

    def close(self) -> None:
        """Let the other ranks end."""
        self._writer.end()
        self._group.close()


class RankRunner:
    """The runner of a rank other than 0: everything but the head."""

    def __init__(self, decoder: Decoder, kv: KVCache) -> None:
        self._decoder = decoder
        self._attention = PagedAttention(decoder.spec, kv)

    @torch.inference_mode()
    def forward(self, step: StepInputs, also: NDArray[np.int64] | None) -> torch.Tensor:
        """Compute this rank's share of ``step``.

        Returns:
            What rank 0 has as ``hidden`` and then ``also``, to the last bit.
        """
        tokens, rows = step.num_tokens, step.num_rows
        buffers = self._decoder.buffers(tokens)
        self._attention.plan(step, buffers.qkv, buffers.attended)
        last: torch.Tensor | None = None
        if also is not None or not step.decode_only:
            last = torch.from_numpy(step.query_start[1 : rows + 1] - 1)
        if also is not None and last is not None:
            last = torch.cat((last, torch.from_numpy(also)))
        return self._decoder.forward(
            torch.from_numpy(step.token_ids[:tokens]),
            torch.from_numpy(step.positions[:tokens]),
            int(step.kv_len[:rows].max()),
            self,
            last,
        )

    def run(self, layer: int) -> None:
        """Attend in ``layer``: the decoder's call in a step."""
        self._attention.run(layer)

    def close(self) -> None:
        """Nothing is open."""


class Follower(Protocol):
    """What computes a rank's share: :class:`RankRunner`, or a GPU's."""

    def forward(self, step: StepInputs, also: NDArray[np.int64] | None) -> torch.Tensor:
        """Compute ``step``; what rank 0 has as hidden states."""

    def close(self) -> None:
        """Free what must go before the collective does."""


def follow(memory: GroupMemory, reader: PlanReader, runner: Follower) -> None:
    """Compute every step that rank 0 publishes, until there is none to come.

    Raises:
        GroupLostError: another rank is gone, or hangs.
    """
    try:
        while (plan := reader.next()) is not None:
            runner.forward(*plan)
            reader.done()
    except Exception:
        memory.stop(Trouble.FAILED)
        raise
