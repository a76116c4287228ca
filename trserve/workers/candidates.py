"""Which runnable requests a step may take, and what the prefix cache gives those that wait.

Knows no step's limits and no slab.
"""

from __future__ import annotations

from collections.abc import Collection

from trserve.workers.request import Request
from trserve.workers.states import State
from trserve.workers.table import RequestTable


def candidates(table: RequestTable, *, all_of_them: bool) -> Collection[Request]:
    """The runnable requests that a step may take, oldest first.

    Those that wait are given what the prefix cache has of their rows, before each step until they
    start. Left out are, unless ``all_of_them`` are wanted, those whose next block an older one is
    about to compute: of many prompts that begin alike and come at once (or of the choices of one
    request), one computes the beginning and the others find it. Left out are also those that had to
    give up their KV, until something has changed: older ones need the blocks, and would take them
    again. The oldest is never left out.
    """
    if not table.waiting:
        return table.runnable.values()
    pool, taken = table.pool, list[Request]()
    coming: set[int] = set()
    for request in table.runnable.values():
        waits = request.state is State.WAITING
        if waits and taken and request.dropped_at == table.version:
            continue
        # Whoever wants the whole prompt scored must compute all of it.
        waits = waits and not request.needs_scoring
        if waits:
            pool.match(request)
        hashed = pool.next_hash(request)
        if hashed is not None:
            if waits and hashed in coming and not all_of_them:
                continue
            coming.add(hashed)
        taken.append(request)
    return taken
