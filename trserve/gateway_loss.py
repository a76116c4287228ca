"""What the launcher does when the gateway has died: its requests end, and how often that may be.

Between the reap of one gateway and the hello of the next, the launcher is the gateway in the slab:
it alone may write what is the gateway's, because nobody else can. Knows no processes, no HTTP and
no clients; those lost their connections with the process that held them.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from trserve.gateway.slots import Slot, SlotTable
from trserve.ipc.baton import SlotState, unpack
from trserve.ipc.layout import Layout
from trserve.ipc.links import open_outbox
from trserve.ipc.shared import Shared
from trserve.ipc.slab import Slab

MOST_DEATHS: Final = 3
WITHIN_S: Final = 60.0


class GatewayDeaths:
    """Counts the deaths of gateways; the third in a minute is one too many."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=MOST_DEATHS)

    def note(self, now: float) -> bool:
        """Count one at ``now`` (seconds); whether another gateway is to be started."""
        self._times.append(now)
        return len(self._times) < MOST_DEATHS or now - self._times[0] > WITHIN_S


def cancel_requests(shared: Shared, layout: Layout, share: range | None = None) -> int:
    """Cancel every LIVE request for a gateway that was reaped; returns how many there were.

    ``share`` are the slots that were its own, all if there is no other allocator.

    Every worker that ever heard of one is told and rung, pending holders of blocks too. That
    covers a baton whose RUN descriptor died with its producer: a CANCEL is a hint like any other,
    and whoever gets it looks at the slot. The slots are freed by the next gateway.
    """
    slab = Slab(shared.slab_fd, layout)
    slots = SlotTable(slab, open_outbox(slab, shared.bells, layout.gateway), share)
    its = share or range(layout.slots)
    live = [index for index in its if unpack(slab.baton[index]).state is SlotState.LIVE]
    for index in live:
        slots.cancel(Slot(index, slab.gen[index]))
    return len(live)
