"""What a worker asks of its device, to tell the launcher: whether MPS is really in use.

A program whose MPS daemon cannot be reached runs without MPS and says nothing, so the launcher has
its workers look. Only a worker on a GPU calls this; the driver's library is opened then.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

MPS_ENABLED: Final = 133
"""``CU_DEVICE_ATTRIBUTE_MPS_ENABLED`` of cuda.h."""

_DRIVER: Final = "libcuda.so.1"


def mps_enabled(driver: Any = None) -> bool | None:
    """Whether the first visible device is used through MPS; None if the driver does not say.

    Args:
        driver: the driver's library; opened if not given.
    """
    try:
        library = driver if driver is not None else ctypes.CDLL(_DRIVER)
    except OSError:
        return None
    device, value = ctypes.c_int(), ctypes.c_int()
    failed = (
        library.cuInit(0)
        or library.cuDeviceGet(ctypes.byref(device), 0)
        or library.cuDeviceGetAttribute(ctypes.byref(value), MPS_ENABLED, device)
    )
    return None if failed else bool(value.value)
