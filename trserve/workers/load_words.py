"""What a worker says of its load in its header words. Knows no step and no request."""

from __future__ import annotations

import time

import numpy as np

from trserve.ipc.layout import WORKER_WORDS
from trserve.ipc.slab import WorkerWords
from trserve.workers.table import RequestTable

_STEPS = WORKER_WORDS.index("steps")
_RUNNING = WORKER_WORDS.index("running")
_PENDING = WORKER_WORDS.index("pending")
_FREE = WORKER_WORDS.index("free_blocks")
_CACHED = WORKER_WORDS.index("cached_blocks")
_KV_DROPS = WORKER_WORDS.index("kv_drops")
_KV_REPAIRS = WORKER_WORDS.index("kv_repairs")
_QUERIED = WORKER_WORDS.index("cache_queried_tokens")
_HIT = WORKER_WORDS.index("cache_hit_tokens")
_EVICTIONS = WORKER_WORDS.index("cache_evictions")
_HEARTBEAT = WORKER_WORDS.index("heartbeat")


class LoadWords:
    """The header words of the worker whose requests ``table`` has; it is their one writer."""

    def __init__(self, words: WorkerWords, table: RequestTable) -> None:
        self._words = words.words
        self._table = table

    def beat(self, now_ns: int) -> None:
        """This worker is not hung, as of ``now_ns`` (``time.monotonic_ns``)."""
        self._words[_HEARTBEAT] = now_ns

    @property
    def heartbeat_address(self) -> int:
        """Where compiled code may say the same; valid as long as the slab is mapped."""
        return int(np.frombuffer(self._words, np.int64)[_HEARTBEAT:].ctypes.data)

    def beat_now(self) -> None:
        """This worker is not hung."""
        self._words[_HEARTBEAT] = time.monotonic_ns()

    def count_step(self) -> None:
        """One more step was computed."""
        self._words[_STEPS] += 1

    def note(self) -> None:
        """Say how many requests and blocks there are now."""
        table, pool, words = self._table, self._table.pool, self._words
        words[_RUNNING] = len(table.runnable)
        words[_PENDING] = len(table.resident) - len(table.runnable)
        words[_FREE] = pool.num_free
        words[_CACHED] = pool.num_cached
        words[_QUERIED] = pool.queried_tokens
        words[_HIT] = pool.hit_tokens
        words[_EVICTIONS] = pool.evictions
        words[_KV_DROPS] = table.kv_drops
        words[_KV_REPAIRS] = table.kv_repairs
