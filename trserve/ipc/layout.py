"""Where every field of the slab lies. Pure arithmetic; maps no memory.

Structure of arrays: one contiguous, 64-byte aligned array per field over all slots, so that one
numpy comparison covers all baton words and no two writers share a cache line by accident.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

LINE: Final = 64
MAGIC: Final = 0x5452_5345_5256_4531  # "TRSERVE1"
LAYOUT_VERSION: Final = 10
PARAMS_BYTES: Final = 4096
ROUTER_EXTRAS_BYTES: Final = 64
RUNTIME_EXTRAS_BYTES: Final = 16
EXTRAS_BYTES: Final = RUNTIME_EXTRAS_BYTES + ROUTER_EXTRAS_BYTES
PAGE_WORDS: Final = 4096
MAX_TOPS: Final = 20
MAX_PAGES_PER_REQUEST: Final = 1024  # 16 MiB
MAX_PAGES: Final = 4096  # 64 MiB, of which what nobody asked for is never touched
HEADER_WORDS: Final = 8
GATEWAY_HEARTBEAT_WORD: Final = 6
EPOCH_WORD: Final = 7
"""Behind what tells the layout: ``time.monotonic_ns`` at the gateway's last sign of life; and how
many workers were reaped, the launcher's to write."""

DESCRIPTOR_WORDS: Final = 2
RING_HEADER_WORDS: Final = 3 * LINE // 8  # head, tail and overflow count, a line each
TRACE_RECORD_WORDS: Final = 4
TRACE_RECORDS: Final = 2**15  # a power of two; 1 MiB a process, some seconds of a busy one

WORKER_WORDS: Final = (
    "status",
    "running",
    "pending",
    "free_blocks",
    "total_blocks",
    "steps",
    "kv_drops",
    "cached_blocks",
    "cache_queried_tokens",
    "cache_hit_tokens",
    "cache_evictions",
    "kv_repairs",
    "heartbeat",
    "early_tokens",
    "early_tokens_used",
    "buffered",
    "in_step",
    "batch_threshold",
    "slowest_step_ns",
    "gate_threshold",
    "gate_nobody_runs",
    "gate_timeout",
    "gate_drain",
    "round",
    "reach",
    "reach_changes",
    "outages",
    "link_handoffs",
    "link_handoff_bytes",
    "link_contacts",
    "link_contact_bytes",
    "link_answers",
    "link_answer_bytes",
    "link_dropped",
    "link_round_trip_us",
    "link_nccl_handoffs",
    "link_nccl_answers",
)
"""Words of a worker's header lines, each with one writer (``status``: launcher; others: worker, or
the launcher for one that was reaped).

``heartbeat`` is ``time.monotonic_ns`` at the worker's last sign of life. ``buffered`` and
``in_step`` count requests for the peers' gates, ``batch_threshold`` is the B in force, and
``gate_*`` count openings by reason; ``round`` counts steps that all models take together.
``reach`` (see ``Reach``), how often it changed, how often a model could not be reached, and the
``link_*`` counts are those of models at other hosts.
"""

ESTIMATE_WORDS: Final = (
    "live",
    "predicted_tokens_per_s",
    "eager_tokens_per_s",
    "measured_tokens_per_s",
    "solutions",
    "changes",
    "heartbeat",
)
"""float64 words of the solver, before its matrices (``Layout.estimate_words``); 0 before it knows
any. ``heartbeat`` counts its signs of life."""

METER_COUNTERS: Final = (
    "threshold",
    "busy_ns",
    "first",
    "resume",
    "append",
    "reprefill",
    "reprefill_tokens",
    "failed_route",
    "failed_send",
    "failed_receive",
    "failed_admit",
    "failed_score",
)
"""Words of a worker's meter before its histograms, see meter.py."""

MAX_METER_BOUNDS: Final = 100
METER_HISTOGRAM_WORDS: Final = MAX_METER_BOUNDS + 2
"""Counts up to each bound, one of what lies above all of them, and the sum of the values."""

STEP_CLASSES: Final = 8
"""Classes of steps by their rows: 1, 2, up to 4, 8, 16, 32, 64, and more."""

SINGLE_HISTOGRAMS: Final = 5
HISTOGRAMS_BY_PEER: Final = 4

WORKER_LINES: Final = -(-len(WORKER_WORDS) * 8 // LINE)


class Region(NamedTuple):
    """Byte offset and length of one field."""

    offset: int
    size: int


def record_words(tops: int) -> int:
    """Words of an annotation with ``tops`` most probable tokens."""
    return 3 + 2 * tops


def pages_for(records: int, tops: int) -> int:
    """Annotation pages that hold ``records`` records; no record spans two."""
    return -(-records // (PAGE_WORDS // record_words(tops)))


def _align(offset: int) -> int:
    return -(-offset // LINE) * LINE


def _power_of_two_at_least(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()


@dataclass(frozen=True)
class Layout:
    """Offsets of a slab for ``slots`` requests, rows of ``row_tokens``, and ``workers`` workers."""

    slots: int
    row_tokens: int
    workers: int

    @property
    def ring_capacity(self) -> int:
        """Descriptors a ring holds: at least twice the slots, a power of two."""
        return _power_of_two_at_least(2 * self.slots)

    @property
    def ring_bytes(self) -> int:
        """Bytes of one ring, header included."""
        return 8 * (RING_HEADER_WORDS + DESCRIPTOR_WORDS * self.ring_capacity)

    @property
    def trace_bytes(self) -> int:
        """Bytes of one process's events."""
        return 8 * TRACE_RECORD_WORDS * TRACE_RECORDS

    @property
    def in_step_bytes(self) -> int:
        """Bytes of the list of one worker's batch: a count, then slots."""
        return _align(8 * (1 + self.slots))

    @property
    def tally_words(self) -> int:
        """Words of one worker's tally: moved and committed by model, steps and time by width."""
        return 2 * self.workers + 2 * (1 + self.slots)

    @property
    def meter_words(self) -> int:
        """Words of one worker's meter: the counters, then the histograms."""
        histograms = SINGLE_HISTOGRAMS + STEP_CLASSES + HISTOGRAMS_BY_PEER * self.workers
        return len(METER_COUNTERS) + METER_HISTOGRAM_WORDS * histograms

    @property
    def estimate_words(self) -> int:
        """float64 words of the solver: the named ones, then P, C (row by row) and L."""
        return len(ESTIMATE_WORDS) + 2 * self.workers**2 + self.workers

    @property
    def pages_per_request(self) -> int:
        """Annotation pages that one request may hold: a whole row's, within reason."""
        return min(pages_for(self.row_tokens, MAX_TOPS), MAX_PAGES_PER_REQUEST)

    @property
    def num_pages(self) -> int:
        """Annotation pages that there are."""
        return min(self.slots * self.pages_per_request, MAX_PAGES)

    @property
    def gateway(self) -> int:
        """The gateway's index as a producer and as the owner of a doorbell."""
        return self.workers

    @cached_property
    def regions(self) -> dict[str, Region]:
        """Every field's place, in the order of the file."""
        words = 8 * self.slots
        sizes = {
            "header": 8 * HEADER_WORDS,
            "workers": WORKER_LINES * LINE * self.workers,
            "baton": words,
            "gen": words,
            "cancel": words,
            "sent": words,
            "prompt_len": words,
            "limit": words,
            "cached": words,
            "params_len": words,
            "suspect": words,
            "in_step": self.in_step_bytes * self.workers,
            "tallies": _align(8 * self.tally_words) * self.workers,
            "meters": _align(8 * self.meter_words) * self.workers,
            "estimates": 8 * self.estimate_words,
            "closed": words * self.workers,
            "left": words * self.workers,
            "extras": 2 * EXTRAS_BYTES * self.slots,
            "params": PARAMS_BYTES * self.slots,
            "source": self.row_tokens * self.slots,
            "tokens": 4 * self.row_tokens * self.slots,
            "page_table": 4 * self.pages_per_request * self.slots,
            "pages": 4 * PAGE_WORDS * self.num_pages,
            "rings": self.ring_bytes * self.workers * (self.workers + 1),
            "traces": self.trace_bytes * (self.workers + 1),
        }
        regions: dict[str, Region] = {}
        offset = 0
        for name, size in sizes.items():
            regions[name] = Region(offset, size)
            offset = _align(offset + size)
        return regions

    @property
    def size(self) -> int:
        """Bytes of the whole slab."""
        last = self.regions["traces"]
        return _align(last.offset + last.size)

    def ring_offset(self, producer: int, consumer: int) -> int:
        """Byte offset of the ring from ``producer`` (a worker, or the gateway) to a worker."""
        index = consumer * (self.workers + 1) + producer
        return self.regions["rings"].offset + index * self.ring_bytes

    def tally_offset(self, worker: int) -> int:
        """Byte offset of a worker's tally."""
        return self.regions["tallies"].offset + worker * _align(8 * self.tally_words)

    def meter_offset(self, worker: int) -> int:
        """Byte offset of a worker's meter."""
        return self.regions["meters"].offset + worker * _align(8 * self.meter_words)

    def trace_offset(self, process: int) -> int:
        """Byte offset of the events of ``process``: a worker, or the gateway."""
        return self.regions["traces"].offset + process * self.trace_bytes

    def header(self) -> tuple[int, ...]:
        """The words that the launcher writes and every child checks."""
        return (MAGIC, LAYOUT_VERSION, self.slots, self.row_tokens, self.workers, self.size)

    @classmethod
    def from_header(cls, header: Sequence[int]) -> Layout | None:
        """The layout that wrote ``header``; None if it was another version's, or nobody's."""
        found = tuple(header)
        if len(found) < HEADER_WORDS or found[:2] != (MAGIC, LAYOUT_VERSION):
            return None
        layout = cls(*found[2:5])
        return layout if layout.header() == found[: len(layout.header())] else None
