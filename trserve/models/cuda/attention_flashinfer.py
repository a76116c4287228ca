"""Paged attention by flashinfer: its decode kernels, and its append kernels for wider rows.

Written against flashinfer 0.6.18; the arguments used are those of 0.5.3 to 0.7.0. What its planner
needs is on the host anyway, so it gets host arrays and copies nothing back; blocks alone are copied
here first, because it would wait for the stream to copy those. Runs its kernels only on a device,
and has not yet.

Knows flashinfer's wrappers; nothing of layers' weights or of graphs beyond their buckets.
"""

from __future__ import annotations

import re
from typing import Any, Final

import torch

from trserve.errors import ModelUnavailableError
from trserve.models.cuda.attention import BatchGeometry, PagedLayers
from trserve.models.cuda.attention_plan import PlanArrays, memory_size, section_offsets
from trserve.models.cuda.attention_staging import Staging
from trserve.models.cuda.attention_workspace import Heads, workspace_bytes

_LAYOUT: Final = "HND"

_OVERFLOW: Final = "AlignedAllocator"
"""What its planner names where a buffer has too few bytes."""

_BUILD_ERROR: Final = re.compile(r"\b(error|fatal)\b")

_WRAPPERS_OWN: Final = ("_int_workspace_buffer", "_pin_memory_int_workspace_buffer")
"""8 MiB each on the device and pinned, in every wrapper: one of each serves all, as a plan is made
anew before every use."""


class FlashinferAttention:
    """See :class:`trserve.models.cuda.attention.AttentionBackend`.

    There is one pair of wrappers for eager steps, and one wrapper for each bucket and width of a
    graph, over the same buffers.
    """

    name = "flashinfer"
    replays = True

    def __init__(self, paged: PagedLayers) -> None:
        import flashinfer

        self._flashinfer: Any = flashinfer
        self._paged = paged
        device = paged.device
        # Zeroed, as its first use wants it.
        self._workspace = torch.zeros(_workspace_size(paged), dtype=torch.uint8, device=device)
        self._staging = Staging(memory_size(paged), device)
        self._host = PlanArrays(paged, self._staging.host)
        starts, lengths, blocks, lasts, table = section_offsets(paged.max_rows)
        host = self._staging.tensor
        self._starts, self._lengths = host[starts:lengths], host[lengths:blocks]
        self._firsts, self._lasts = host[blocks:lasts], host[lasts:table]
        self._table = host[table:]
        # The wrappers' buffers, in the same sections.
        self._device = torch.zeros(memory_size(paged), dtype=torch.int32, device=device)
        self._device_table = self._device[table:]
        self._wrappers: dict[tuple[int, int], Any] = {}
        self._wrapper: Any = None

    def plan(self, batch: BatchGeometry) -> None:
        """Let flashinfer plan ``batch``, outside any graph; its first plans build kernels.

        Raises:
            ModelUnavailableError: they cannot be built here.
        """
        # Its planner's pinned memory is the same every time.
        self._staging.wait()
        host = self._host
        host.fill(batch)
        count = len(host.blocks)
        table = self._device_table[:count]
        table.copy_(self._table[:count], non_blocking=True)
        self._wrapper = self._wrapper_for(batch)
        rows = host.rows
        where = [self._firsts[: rows + 1], table, self._lasts[:rows]]
        if batch.width != 1:
            where.insert(0, self._starts[: rows + 1])
        try:
            self._wrapper.plan(*where, *self._shape(), **self._options(batch, rows))
        except (RuntimeError, OSError) as error:
            raise ModelUnavailableError(_failure(error)) from error
        self._staging.sent()

    def _shape(self) -> tuple[int, int, int, int]:
        paged = self._paged
        return paged.num_heads, paged.num_kv_heads, paged.head_dim, paged.block_size

    def _options(self, batch: BatchGeometry, rows: int) -> dict[str, Any]:
        """What plans of either kind take by keyword."""
        options = {
            "q_data_type": self._paged.dtype,
            "kv_data_type": self._paged.dtype,
            "sm_scale": self._paged.softmax_scale,
            "seq_lens": self._lengths[:rows],
            "non_blocking": True,
        }
        if batch.width == 1:
            return options
        # Known here; it would look for the largest of its own array, one number at a time.
        return {**options, "causal": True, "max_token_per_sequence": self._host.widest}

    def run(self, layer: int, q: torch.Tensor, out: torch.Tensor) -> None:
        """Attend in ``layer``."""
        self._wrapper.run(q, self._paged.layers[layer], out=out)

    def _wrapper_for(self, batch: BatchGeometry) -> Any:
        """The wrapper of the batch's graph, or of eager steps (bucket 0, width 1 or any)."""
        key = (batch.bucket, batch.width if batch.bucket or batch.width == 1 else 0)
        wrapper = self._wrappers.get(key)
        if wrapper is None:
            make = self._decode_wrapper if batch.width == 1 else self._extend_wrapper
            wrapper = make(batch.bucket)
            for name in _WRAPPERS_OWN if self._wrappers else ():
                setattr(wrapper, name, getattr(next(iter(self._wrappers.values())), name))
            self._wrappers[key] = wrapper
        return wrapper

    def _decode_wrapper(self, bucket: int) -> Any:
        tensor_cores = use_tensor_cores(self._paged.group)
        buffers = {}
        if bucket:
            _, firsts, table, lasts = self._buffers(bucket)
            buffers = {
                "paged_kv_indptr_buffer": firsts,
                "paged_kv_indices_buffer": table,
                "paged_kv_last_page_len_buffer": lasts,
            }
        return self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            kv_layout=_LAYOUT,
            use_cuda_graph=bucket > 0,
            use_tensor_cores=tensor_cores,
            backend="fa2" if tensor_cores else "auto",
            **buffers,
        )

    def _extend_wrapper(self, bucket: int) -> Any:
        buffers = {}
        if bucket:
            starts, firsts, table, lasts = self._buffers(bucket)
            buffers = {
                "qo_indptr_buf": starts,
                "paged_kv_indptr_buf": firsts,
                "paged_kv_indices_buf": table,
                "paged_kv_last_page_len_buf": lasts,
            }
        # Over pages its other kernels are slower.
        return self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            self._workspace,
            kv_layout=_LAYOUT,
            use_cuda_graph=bucket > 0,
            backend="fa2",
            **buffers,
        )

    def _buffers(self, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Device buffers of ``rows`` rows: first tokens, first blocks, blocks, last lengths."""
        starts, _, blocks, lasts, _ = section_offsets(self._paged.max_rows)
        memory = self._device
        return (
            memory[starts : starts + rows + 1],
            memory[blocks : blocks + rows + 1],
            self._device_table,
            memory[lasts : lasts + rows],
        )


def _workspace_size(paged: PagedLayers) -> int:
    processors = torch.cuda.get_device_properties(paged.device).multi_processor_count
    heads = Heads(paged.num_heads, paged.num_kv_heads, paged.head_dim)
    return workspace_bytes(heads, processors, paged.graphs)


def _failure(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if small := [line for line in lines if _OVERFLOW in line]:
        return (
            f"flashinfer's workspace is too small for this step ({small[0]}): this version plans "
            "otherwise than those that are known; TRSERVE_ATTENTION=triton attends without it"
        )
    return (
        f"flashinfer could not plan, or not build its kernels ({_telling(lines)}); it needs nvcc "
        "and ninja, or kernels built before; TRSERVE_ATTENTION=triton attends without it"
    )


def _telling(lines: list[str]) -> str:
    """The line of a failed build that says why: what follows only says that it has stopped."""
    return next((line for line in lines if _BUILD_ERROR.search(line)), lines[-1])


def use_tensor_cores(group: int) -> bool:
    """Whether decodes of ``group`` query heads a KV head go through the tensor-core kernel.

    The other kernel knows few group sizes, differing between versions, and is slower from 4 on.
    """
    return group >= 4 or group not in (1, 2, 3)
