"""The gateway process while a server serves: found out when it hangs, replaced when it has died.

Its event loop says once a second in the slab that it runs. Knows no HTTP, no clients and no server
states; what becomes of a dead gateway's requests is ``gateway_loss``'s business.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from trserve.children import Child
from trserve.errors import EXIT_WORKER_LOST, StartFailedError
from trserve.gateway_loss import MOST_DEATHS, GatewayDeaths, cancel_requests
from trserve.ipc.shared import Shared
from trserve.ipc.slab import Slab
from trserve.plan import ServerPlan
from trserve.watchdog import Watchdog
from trserve.worker_lives import REAPED_AFTER_S
from trserve.workforce import LOOK_EVERY_S, START_AGAIN_S

_GATEWAY: Final = 0  # the one that the watchdog watches


class GatewayWatch:
    """Watches the gateway of ``plan``.

    Args:
        start: starts a gateway; raises StartFailedError.
        note: says something to people.
    """

    def __init__(
        self,
        plan: ServerPlan,
        shared: Shared,
        start: Callable[[], None],
        note: Callable[[str], None],
    ) -> None:
        self._limit_s = plan.watchdog_s
        self._share = plan.gateway_slots
        self._slab = Slab(shared.slab_fd, plan.layout)
        self._shared = shared
        self._start = start
        self._note = note
        self._deaths = GatewayDeaths()
        self._watchdog = Watchdog(plan.watchdog_s)
        self._watched: Child | None = None
        self._killed_at: float | None = None
        self._look_at = 0.0
        self._start_at: float | None = None

    def replace(self, child: Child, now: float) -> str | None:
        """Replace one that was reaped; returns why the server must end, if it must."""
        end = child.failure[0] if child.failure else f"{child.title} {child.describe_end()}"
        if cause := self._count(end, now):
            return cause
        lost = cancel_requests(self._shared, self._slab.layout, self._share)
        self._note(f"{end}; {lost} requests are cancelled, a new gateway starts")
        return self._start_one(now)

    def tick(self, child: Child | None, now: float) -> str | None:
        """Do what is due; returns why the server must end, if it must.

        ``child`` is the gateway, if there is one and it is to be watched.
        """
        if self._start_at is not None and self._start_at <= now:
            return self._start_one(now)
        if now < self._look_at:
            return None
        self._look_at = now + LOOK_EVERY_S
        if child is not self._watched:
            self._watched, self._killed_at = child, None
            self._watchdog.forget(_GATEWAY)
        if child is None or child.is_owner or not child.ready:
            return None
        return self._look(child, now)

    def _look(self, child: Child, now: float) -> str | None:
        if self._killed_at is not None:
            late = now - self._killed_at >= REAPED_AFTER_S
            return f"{child.title} hung and does not end although it was killed" if late else None
        if self._watchdog.hangs(_GATEWAY, self._slab.gateway_heartbeat, now):
            message = f"{child.title} hung for {self._limit_s:g} s and was killed"
            child.failure = (message, EXIT_WORKER_LOST)
            self._killed_at = now
            child.process.kill()
        return None

    def _start_one(self, now: float) -> str | None:
        self._start_at = None
        try:
            self._start()
        except StartFailedError as error:
            if cause := self._count(str(error), now):
                return cause
            self._note(f"{error}; it is tried again")
            self._start_at = now + START_AGAIN_S
        return None

    def _count(self, end: str, now: float) -> str | None:
        if self._deaths.note(now):
            return None
        return f"{end}; {MOST_DEATHS} gateways in a minute are too many"
