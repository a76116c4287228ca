"""Pinned host memory that is copied to a device, and when it may be written again.

Knows nothing of what is copied. On the CPU memory is not pinned and nothing is waited for.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch


class Staging:
    """int32 memory on the host for copies to ``device``.

    Attributes:
        tensor: the memory, pinned for a CUDA device: copies from it are asynchronous.
        host: the same as an array.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self.tensor = torch.zeros(size, dtype=torch.int32, pin_memory=cuda)
        self.host: npt.NDArray[np.int32] = self.tensor.numpy()
        event: Callable[[], torch.cuda.Event] = torch.cuda.Event
        self._copied = event() if cuda else None

    def wait(self) -> None:
        """Wait until the copies before the last :meth:`sent` have left the host memory.

        They are at most a step behind on their stream, and by then mostly done.
        """
        if self._copied is not None:
            self._copied.synchronize()

    def sent(self) -> None:
        """Copies that the current stream has been given so far are to be waited for."""
        if self._copied is not None:
            self._copied.record()
