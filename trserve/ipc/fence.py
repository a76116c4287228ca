"""Memory fences between the phases of a publication. Knows no layout.

The protocol needs two orders only: a writer's earlier stores become visible before its later ones
(store–store), and a reader's earlier loads are taken before its later ones (load–load).

x86-64 (TSO): stores leave the store buffer in program order and loads are not reordered with
loads, so both fences are empty there; CPython is no optimizing compiler that would move a
``memoryview`` access across another bytecode. Nothing in the protocol needs store–load order: the
doorbell is written always, with no "is it asleep" flag, and an eventfd write is a system call.

Elsewhere (AArch64): ``atomic_thread_fence`` of libatomic, release before the later stores,
acquire after the earlier loads (C11 7.17.4). Reasoned, not measured.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from functools import partial
from typing import Final

from trserve.errors import StartupError

_ACQUIRE: Final = 2
_RELEASE: Final = 3
_TOTAL_STORE_ORDER: Final = frozenset({"x86_64", "AMD64"})


def _nothing() -> None:
    """Total store order: the hardware already keeps both orders."""


def _fences() -> tuple[Callable[[], object], Callable[[], object]]:
    if platform.machine() in _TOTAL_STORE_ORDER:
        return _nothing, _nothing
    try:
        fence = ctypes.CDLL("libatomic.so.1").atomic_thread_fence
    except (OSError, AttributeError) as error:
        raise StartupError(
            f"libatomic.so.1 is needed for memory fences on {platform.machine()}: "
            "install the system package libatomic1"
        ) from error
    fence.argtypes = [ctypes.c_int]
    fence.restype = None
    return partial(fence, _RELEASE), partial(fence, _ACQUIRE)


store_fence, load_fence = _fences()
