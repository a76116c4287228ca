"""The slab: the shared-memory table of all live requests and their tokens. Knows no sockets.

One anonymous memory file per server, inherited by every child; it has no name, so nothing leaks.
Single words that two processes share are read and written only through ``memoryview.cast('q')``,
which is one aligned machine load or store; numpy views serve vectors only. Who may write what:

========================================  =====================================================
field                                     writer
========================================  =====================================================
``gen``, ``prompt_len``, ``limit``,       gateway, before the slot goes LIVE
``params``, ``page_table``
``baton``, ``tokens``, ``source``,        the baton holder (the gateway until LIVE and after
``extras``, ``sent``, its ``pages``       everyone has closed; the launcher for a reaped worker)
``cancel``, ``gateway_heartbeat``         gateway
``closed[w]``, ``in_step[w]``             worker w (``closed``: the launcher for a reaped worker)
``left[w]``                               worker w as the baton holder (the launcher for it; the
                                          gateway before the slot goes LIVE)
``epoch``, ``suspect``                    launcher
``traces[p]``                             process p, see trace.py
``tallies[w]``, ``meters[w]``             worker w, see tally.py and meter.py
``estimates``                             the solver
========================================  =====================================================
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence
from enum import IntEnum
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from trserve.control_groups import memory_left
from trserve.errors import StartupError
from trserve.ipc.baton import OWNER_AND_STATE, STATE_MASK, STATE_SHIFT, SlotState, live_of
from trserve.ipc.layout import (
    EPOCH_WORD,
    EXTRAS_BYTES,
    GATEWAY_HEARTBEAT_WORD,
    LINE,
    PAGE_WORDS,
    PARAMS_BYTES,
    WORKER_LINES,
    WORKER_WORDS,
    Layout,
)

_LIVE: Final = int(SlotState.LIVE) << STATE_SHIFT
_STATUS: Final = WORKER_WORDS.index("status")
_REACH: Final = WORKER_WORDS.index("reach")
_Scalar = TypeVar("_Scalar", bound=np.generic)
_F_ADD_SEALS: Final = 1033
_F_SEAL_SHRINK_GROW: Final = 0x2 | 0x4
_MEMINFO: Final = "/proc/meminfo"
MAX_SHARE_OF_MEMORY: Final = 0.5
SLAB_NAME: Final = "trserve-slab"
"""What the kernel shows for the memory file; no two processes find each other by it."""


def available_memory() -> int:
    """Bytes that this process would get without swapping.

    ``MemAvailable``, which is the machine's, or what its control groups leave if that is less.
    """
    with open(_MEMINFO, encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                free, left = int(line.split()[1]) * 1024, memory_left()
                return free if left is None else min(free, max(left, 0))
    raise StartupError("/proc/meminfo has no MemAvailable: trserve needs Linux 3.14 or newer")


def create_slab_file(layout: Layout) -> int:
    """A sealed memory file of the layout's size; returns its descriptor.

    Raises StartupError when the slab would take more than half of the available memory, or a
    limit of file sizes forbids it.
    """
    if layout.size > MAX_SHARE_OF_MEMORY * available_memory():
        raise StartupError(
            f"the slab for {layout.slots} requests of {layout.row_tokens} tokens needs "
            f"{layout.size / 2**30:.1f} GiB, more than half of the memory that is free: "
            "lower --max-requests or --max-model-len"
        )
    fd = os.memfd_create(SLAB_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, layout.size)
    except OSError as error:
        os.close(fd)
        raise StartupError(
            f"the slab, a memory file of {layout.size / 2**20:.1f} MiB, is refused: "
            f"{error.strerror}\nlift the limit of file sizes: ulimit -f unlimited (systemd: "
            "LimitFSIZE=infinity)"
        ) from None
    fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK_GROW)
    return fd


class WorkerStatus(IntEnum):
    """What the launcher says of a worker in its ``status`` word."""

    STARTING = 0
    UP = 1
    RESTARTING = 2  # reaped; from here to its successor's hello the launcher is that worker
    LOST = 3  # given up: it owns nothing any more, and nothing goes there


class Reach(IntEnum):
    """What a worker that stands for a model at another host says of it in its ``reach`` word."""

    HERE = 0  # it can be reached, or is here
    ALONE = 1  # it cannot: nobody sends anything there, and what is written for want of it says so
    ELSEWHERE = 2  # whoever has a request there is at home with it: nobody waits for them
    FAILS = 3  # it cannot be reached, and requests that go there end
    WAITS = 4  # it cannot be reached, and requests that go there wait


class WorkerWords:
    """The header lines of one worker: single-writer words by name, or by index in loops."""

    def __init__(self, words: memoryview) -> None:
        self.words = words

    def get(self, name: str) -> int:
        """The word's value."""
        return int(self.words[WORKER_WORDS.index(name)])

    def set(self, name: str, value: int) -> None:
        """Store the word; the caller is its one writer."""
        self.words[WORKER_WORDS.index(name)] = value


def count_live(batons: NDArray[np.int64]) -> int:
    """N: how many of ``batons`` (the words of all slots) are published and not finished."""
    return int(np.count_nonzero(batons & STATE_MASK == _LIVE))


def count_reachable(batons: NDArray[np.int64], workers: Sequence[WorkerWords]) -> int:
    """N without the requests of workers that are being replaced, or are lost.

    Those are in no buffer, and nobody knows for how long: no gate waits for them. Nor for those of
    models at other hosts that cannot be reached, or whose requests are at home.
    """
    live = count_live(batons)
    for worker, words in enumerate(workers):
        if words.words[_STATUS] > WorkerStatus.UP or words.words[_REACH]:
            live -= int(np.count_nonzero(batons & OWNER_AND_STATE == live_of(worker)))
    return live


class Slab:
    """A process's view of the slab.

    Attributes (S slots, W workers, R tokens a row):
        baton, gen, cancel, sent, prompt_len, limit: memoryviews of S int64 words.
        cached: S int64 words: prompt tokens that were in the prefix cache of the worker that
            computed the prompt first, the baton holder's to write; -1 before.
        closed: W memoryviews of S int64 words.
        left: likewise: the row's length when the worker last gave the baton away; 0 before.
        baton_vector: the same memory for numpy, whole-array use only.
        tokens: int32 [S, R]; source: uint8 [S, R].
        page_table: int32 [S, pages a request]; pages: int32 [pages, words], see annotations.py.
        suspect: S int64 words: the generation that may have ended a worker, or another.
        in_step: W int64 arrays [1 + S]: how many slots the running step has, then these.
        workers: one WorkerWords per worker.
        estimates: float64 words, see estimates.py.
    """

    def __init__(self, fd: int, layout: Layout, *, create: bool = False) -> None:
        self.layout = layout
        if os.fstat(fd).st_size != layout.size:
            raise StartupError(
                f"the slab has {os.fstat(fd).st_size} bytes, this layout {layout.size}: "
                "launcher and child are different versions of trserve"
            )
        self._map = mmap.mmap(fd, layout.size)
        self._bytes = memoryview(self._map)
        self.header = self._words("header")
        if create:
            for index, word in enumerate(layout.header()):
                self.header[index] = word
        self._check_header()
        self.baton = self._words("baton")
        self.gen = self._words("gen")
        self.cancel = self._words("cancel")
        self.sent = self._words("sent")
        self.prompt_len = self._words("prompt_len")
        self.limit = self._words("limit")
        self.cached = self._words("cached")
        self._params_len = self._words("params_len")
        self.suspect = self._words("suspect")
        slots, row = layout.slots, layout.row_tokens
        self.closed = self._words_of_workers("closed")
        self.left = self._words_of_workers("left")
        self.baton_vector = self._array("baton", np.int64, (slots,))
        self.tokens = self._array("tokens", np.int32, (slots, row))
        self.source = self._array("source", np.uint8, (slots, row))
        self.page_table = self._array("page_table", np.int32, (slots, layout.pages_per_request))
        self.pages = self._array("pages", np.int32, (layout.num_pages, PAGE_WORDS))
        in_step = self._array("in_step", np.int64, (layout.workers, layout.in_step_bytes // 8))
        self.in_step = [words[: 1 + slots] for words in in_step]
        self.workers = [WorkerWords(self._worker_words(w)) for w in range(layout.workers)]
        self.estimates = self._array("estimates", np.float64, (layout.estimate_words,))
        self._extras = self._raw("extras")
        self._params = self._raw("params")

    @property
    def epoch(self) -> int:
        """How many workers were reaped so far; whoever sees it grow rescans."""
        return int(self.header[EPOCH_WORD])

    @epoch.setter
    def epoch(self, value: int) -> None:
        self.header[EPOCH_WORD] = value

    @property
    def gateway_heartbeat(self) -> int:
        """``time.monotonic_ns`` when the gateway's event loop last came round."""
        return int(self.header[GATEWAY_HEARTBEAT_WORD])

    @gateway_heartbeat.setter
    def gateway_heartbeat(self, value: int) -> None:
        self.header[GATEWAY_HEARTBEAT_WORD] = value

    def _check_header(self) -> None:
        found = tuple(self.header[: len(self.layout.header())])
        if found != self.layout.header():
            raise StartupError(
                f"slab header {found} is not that of this layout {self.layout.header()}: "
                "launcher and child are different versions of trserve"
            )

    def _raw(self, name: str) -> memoryview:
        offset, size = self.layout.regions[name]
        return self._bytes[offset : offset + size]

    def _words(self, name: str) -> memoryview:
        return self._raw(name).cast("q")

    def _words_of_workers(self, name: str) -> list[memoryview]:
        words, slots = self._words(name), self.layout.slots
        return [words[w * slots : (w + 1) * slots] for w in range(self.layout.workers)]

    def _array(self, name: str, dtype: type[_Scalar], shape: tuple[int, ...]) -> NDArray[_Scalar]:
        return np.frombuffer(self._raw(name), dtype=dtype).reshape(shape)

    def _worker_words(self, worker: int) -> memoryview:
        size = WORKER_LINES * LINE // 8
        return self._words("workers")[worker * size : (worker + 1) * size]

    def ring_words(self, producer: int, consumer: int) -> memoryview:
        """The int64 words of one ring, header first."""
        offset = self.layout.ring_offset(producer, consumer)
        return self._bytes[offset : offset + self.layout.ring_bytes].cast("q")

    def tally_words(self, worker: int) -> memoryview:
        """The int64 words of one worker's tally."""
        offset = self.layout.tally_offset(worker)
        return self._bytes[offset : offset + 8 * self.layout.tally_words].cast("q")

    def meter_words(self, worker: int) -> memoryview:
        """The int64 words of one worker's meter."""
        offset = self.layout.meter_offset(worker)
        return self._bytes[offset : offset + 8 * self.layout.meter_words].cast("q")

    def trace_words(self, process: int) -> memoryview:
        """The int64 words of one process's events, a worker's or the gateway's."""
        offset = self.layout.trace_offset(process)
        return self._bytes[offset : offset + self.layout.trace_bytes].cast("q")

    def extras(self, slot: int, bank: int) -> memoryview:
        """The ``extras`` bank of a slot: 16 bytes of the runtime, then 64 of the router."""
        offset = (2 * slot + bank) * EXTRAS_BYTES
        return self._extras[offset : offset + EXTRAS_BYTES]

    def params(self, slot: int) -> memoryview:
        """The parameter blob as written (msgpack)."""
        offset = slot * PARAMS_BYTES
        return self._params[offset : offset + self._params_len[slot]]

    def write_params(self, slot: int, blob: bytes) -> None:
        """Store the blob of a slot that is FILLING; ``blob`` fits PARAMS_BYTES."""
        offset = slot * PARAMS_BYTES
        self._params[offset : offset + len(blob)] = blob
        self._params_len[slot] = len(blob)
