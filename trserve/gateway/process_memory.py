"""How much memory the processes of this server hold, as the kernel says.

Read when somebody asks; knows nothing of what the processes do. The gateway's siblings are the
launcher's children, and each says on its command line which it is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_INDEX: Final = "--index="
_WORKERS: Final = "trserve.workers.main"
_SOLVER: Final = "trserve.solver.main"


def resident_bytes() -> dict[str, int]:
    """Resident bytes by process: ``launcher``, ``gateway``, ``worker-0`` and so on, ``solver``."""
    found = {}
    for name, pid in _processes():
        with suppress(FileNotFoundError, ProcessLookupError):  # it ended a moment ago
            found[name] = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    return found


def _processes() -> Iterator[tuple[str, int]]:
    launcher = os.getppid()
    yield "launcher", launcher
    yield "gateway", os.getpid()
    for pid in _children(launcher):
        with suppress(FileNotFoundError, ProcessLookupError):
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            index = next((word for word in words if word.startswith(_INDEX)), None)
            if index is not None and _WORKERS in words:
                yield f"worker-{index.removeprefix(_INDEX)}", pid
            elif _SOLVER in words:
                yield "solver", pid


def _children(pid: int) -> list[int]:
    with suppress(FileNotFoundError):  # a kernel that is built without this file
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    return []
