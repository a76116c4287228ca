"""Who gives up KV blocks when a step needs more than are free. Knows no model and no slab words.

Pending requests give theirs up first, the one that has been away longest before the others; then
the newest runnable ones, but none that is older than the one that asks: else a stream of short
suffixes could keep a long prompt from ever being computed. Whoever loses blocks computes them
again from its row, but for what is still in the prefix cache then: full blocks that are given up
go there, and are evicted last. A request that cannot fit alone ends with ``length``.
"""

from __future__ import annotations

from collections.abc import Iterator

from trserve.workers.request import Request
from trserve.workers.states import State
from trserve.workers.table import RequestTable

Plan = list[tuple[Request, int]]


def fit_to_memory(plan: Plan, table: RequestTable) -> tuple[Plan, Request | None]:
    """Give every row of ``plan`` its blocks, leaving out those that find none.

    Returns the rows that can run, and the request that cannot fit even alone, if there is one.
    """
    pool, size = table.pool, table.pool.block_size
    lacking = [row for row in plan if row[0].num_computed + row[1] > row[0].num_blocks * size]
    if not lacking or all(
        pool.extend(request, request.num_computed + tokens) for request, tokens in lacking
    ):
        return plan, None
    # The blocks are too few. What was given until now was the right of those that have it.
    fitted: Plan = []
    computed = [request.num_computed for request, _ in plan]
    for (request, tokens), before in zip(plan, computed, strict=True):
        if request.num_computed != before:
            continue  # an older row has its blocks; what it lacks now is in no row of this plan
        has_room = request.num_computed + tokens <= request.num_blocks * size
        if has_room or _make_room(request, tokens, table, _newer(request, table, fitted)):
            fitted.append((request, tokens))
    if fitted or not plan:
        return fitted, None
    # Older ones that are in no row of this plan hold everything. Somebody must go on.
    request, tokens = plan[0]
    if _make_room(request, tokens, table, _others(request, table)):
        return [plan[0]], None
    return [], request


def _make_room(
    request: Request, tokens: int, table: RequestTable, runnable: Iterator[Request]
) -> bool:
    """Give ``request`` blocks for ``tokens`` more; nobody loses any unless that is enough."""
    pool, length = table.pool, request.num_computed + tokens
    if pool.extend(request, length):
        return True
    victims = [*pending_with_blocks(table), *runnable]
    if pool.missing(request, length) > pool.num_available + pool.gain(victims):
        return False
    for victim in victims:
        table.drop_kv(victim)
        if pool.extend(request, length):
            break
    return True


def pending_with_blocks(table: RequestTable) -> list[Request]:
    """Those with blocks that are written elsewhere, longest away first."""
    held = [r for r in table.resident.values() if r.state is State.PENDING and r.num_blocks]
    return sorted(held, key=lambda request: request.last_store_ns)


def _newer(request: Request, table: RequestTable, fitted: Plan) -> Iterator[Request]:
    """Those with blocks that became runnable after ``request``, newest first."""
    keep = {id(row) for row, _ in fitted}
    for candidate in reversed(table.runnable.values()):
        if candidate is request:
            return
        if candidate.num_blocks and id(candidate) not in keep:
            yield candidate


def _others(request: Request, table: RequestTable) -> Iterator[Request]:
    """Those with blocks but for ``request``, newest first."""
    for candidate in reversed(table.runnable.values()):
        if candidate.num_blocks and candidate is not request:
            yield candidate
