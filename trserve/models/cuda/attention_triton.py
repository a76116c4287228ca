"""Paged attention by our own Triton kernels: for devices without flashinfer, and for float32.

``plan`` fills one pinned array and starts one copy; ``run`` launches one kernel, or two where the
keys are shared out. Knows plans and launches; the arithmetic is in ``kernels_attention``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from trserve.models.cuda.attention import BatchGeometry, PagedLayers
from trserve.models.cuda.attention_plan import PlanArrays, memory_size, section_offsets
from trserve.models.cuda.attention_staging import Staging
from trserve.models.cuda.ops import require_triton

if TYPE_CHECKING:
    from trserve.models.cuda.kernels_attention import Launch

_MOST_SPLITS: Final = 32
_PROCESSORS_INTERPRETED: Final = 8
"""Stands for a device's number of processors where kernels are interpreted."""


class TritonAttention:
    """See :class:`trserve.models.cuda.attention.AttentionBackend`."""

    name = "triton"
    replays = True

    def __init__(self, paged: PagedLayers) -> None:
        require_triton()
        from trserve.models.cuda import kernels_attention

        self._kernels = kernels_attention
        self._paged = paged
        self._staging = Staging(memory_size(paged), paged.device)
        self._host = PlanArrays(paged, self._staging.host)
        self._device = torch.zeros(memory_size(paged), dtype=torch.int32, device=paged.device)
        starts, lengths, blocks, _, table = section_offsets(paged.max_rows)
        memory = self._device
        self._arrays = memory[starts:], memory[lengths:], memory[blocks:], memory[table:]
        self._processors = _PROCESSORS_INTERPRETED
        if paged.device.type == "cuda":
            properties = torch.cuda.get_device_properties(paged.device)
            self._processors = properties.multi_processor_count
        longest = paged.max_blocks_per_row * paged.block_size
        self._exact = paged.dtype == torch.float32
        keys = kernels_attention.keys_at_a_time(paged.head_dim, exact=self._exact)
        self._most_splits = min(_MOST_SPLITS, -(-longest // keys))
        self._launch = self._launch_for(1, 1)

    def plan(self, batch: BatchGeometry) -> None:
        """Copy the step's arrays to the device, behind what is on the current stream."""
        self._staging.wait()
        host = self._host
        host.fill(batch)
        self._device[: host.used].copy_(self._staging.tensor[: host.used], non_blocking=True)
        self._staging.sent()
        self._launch = self._launch_for(host.rows, host.widest)

    def _launch_for(self, rows: int, width: int) -> Launch:
        return self._kernels.plan_launch(
            rows,
            width,
            self._paged.group,
            self._paged.num_kv_heads,
            exact=self._exact,
            processors=self._processors,
            most_splits=self._most_splits,
        )

    def run(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        """Attend in ``layer``."""
        paged = self._paged
        self._kernels.attend(
            self._launch, q, paged.layers[layer], out, self._arrays, paged.softmax_scale
        )
