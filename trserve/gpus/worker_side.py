"""What a process of a model on a GPU owes the launcher: a clean end, and the truth about MPS.

For processes that have torch for CUDA; torch is imported when one of them is on a GPU. Knows no
plan and no slab.
"""

from __future__ import annotations

from typing import Any

from trserve.gpus.attributes import mps_enabled
from trserve.gpus.device_exit import DeviceExit
from trserve.gpus.plan import GPU_DEVICE


def hold_device(device: str, parent: int) -> DeviceExit | None:
    """See to it that this process leaves no work on its GPU, should ``parent`` die.

    To be called before the GPU is used, from the main thread. None where ``device`` is no GPU;
    else what to :meth:`~trserve.gpus.device_exit.DeviceExit.finish` with.
    """
    if device != GPU_DEVICE:
        return None
    held = DeviceExit(parent, _synchronize)
    held.install()
    return held


def _synchronize() -> None:
    import torch

    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def device_report(device: str) -> dict[str, Any]:
    """What a worker adds to its message that it is ready; nothing where ``device`` is no GPU."""
    return {"mps": mps_enabled()} if device == GPU_DEVICE else {}
