"""A client that proves an MPS daemon: the launcher's child, started with a worker's environment.

A daemon answers questions, and its server may still not start or take nobody in: that shows only
where a program really uses the device. This one makes a context and looks whether it is MPS's. It
says nothing if all is well or there is no driver to ask, and else one line of why not. What hangs
in a driver can't give up by itself; whoever starts it ends it. Knows no daemon.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any, Final

from trserve.gpus.attributes import mps_enabled

_DRIVER: Final = "libcuda.so.1"
_KNOWN: Final = {
    805: "the MPS server cannot be reached",
    806: "the MPS server refuses this user",
    807: "the MPS server is not ready",
    808: "the MPS server has no client to spare",
    809: "the MPS server has no connection to spare",
}
"""``CUresult`` of cuda.h."""


def why_not(driver: Any = None) -> str:
    """Why the first visible device can't be used through MPS; empty if it can.

    Args:
        driver: the driver's library; opened if not given.
    """
    if driver is None:
        try:
            driver = ctypes.CDLL(_DRIVER)
        except OSError:
            return ""  # then no worker will be a client either, and will say so
    device, context = ctypes.c_int(), ctypes.c_void_p()
    made = driver.cuInit, driver.cuDeviceGet, driver.cuDevicePrimaryCtxRetain
    given = (0,), (ctypes.byref(device), 0), (ctypes.byref(context), device)
    for function, arguments in zip(made, given, strict=True):
        if code := function(*arguments):
            return f"{function.__name__}: CUDA error {code} ({_KNOWN.get(code, 'see cuda.h')})"
    found = mps_enabled(driver)
    driver.cuDevicePrimaryCtxRelease_v2(device)
    return "its device is not used through MPS" if found is False else ""


def main() -> int:
    """Returns 1 where the device can't be used through MPS."""
    if reason := why_not():
        print(reason, flush=True)
    return int(bool(reason))


if __name__ == "__main__":
    sys.exit(main())
