"""When packets arrive: delay, jitter, stalls and a rate, for one direction of a TCP connection.

TCP delivers in order, so a packet that comes late holds up all behind it: a lost one is one that
arrives a retransmission time later. Knows sizes and moments; no sockets and no bytes.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Weather:
    """What the way does to packets; times are one way.

    Attributes:
        delay_ms: how long each packet travels.
        jitter_ms: its time is uniform in ``delay_ms`` minus to plus this.
        stall_chance: share of the packets that arrive ``stall_ms`` later, as lost ones do.
        stall_ms: the retransmission time.
        kbit_per_s: what each direction of each connection carries, 0: any amount.
        seed: of the draws; each direction of each connection has a sequence of its own.
        outages: (begin, length) in seconds since the start, in which nothing arrives.
    """

    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    stall_chance: float = 0.0
    stall_ms: float = 200.0
    kbit_per_s: float = 0.0
    seed: int = 0
    outages: tuple[tuple[float, float], ...] = ()

    def problem(self) -> str | None:
        """What makes no sense, or None."""
        times = (self.delay_ms, self.jitter_ms, self.stall_ms, self.kbit_per_s)
        if not all(math.isfinite(each) and each >= 0 for each in times):
            return "times and rates must be finite and not negative"
        if self.jitter_ms > self.delay_ms:
            return f"jitter of {self.jitter_ms:g} ms is more than the delay, {self.delay_ms:g} ms"
        if not 0 <= self.stall_chance <= 1:
            return f"a share of {self.stall_chance:g} stalled packets is not within 0 and 1"
        if any(begin < 0 or not 0 < length < math.inf for begin, length in self.outages):
            return "an outage begins at 0 s or later and has a length"
        return None


class Clock:
    """When packets of one direction of one connection arrive; asked in the order they are sent."""

    def __init__(self, weather: Weather, dice: random.Random, ready: float = 0.0) -> None:
        self.weather = weather
        self._dice = dice
        self._free = ready
        self._last = 0.0
        self.stalls = 0

    def arrival(self, now: float, size: int) -> float:
        """When a packet of ``size`` bytes arrives that is sent at ``now``, both in seconds."""
        weather, dice = self.weather, self._dice
        leaves = max(now, self._free)
        if weather.kbit_per_s:
            leaves += 8e-3 * size / weather.kbit_per_s
        self._free = leaves
        # Two draws a packet whatever the weather: a seed means the same packets at any setting.
        swing, chance = dice.random(), dice.random()
        takes_ms = weather.delay_ms + weather.jitter_ms * (2 * swing - 1)
        if chance < weather.stall_chance:
            self.stalls += 1
            takes_ms += weather.stall_ms
        self._last = max(self._last, leaves + 1e-3 * takes_ms)
        return self._last
