"""Who gives up KV blocks when a step needs more than are free. Knows no model and no slab words.

Pending requests give theirs up first, the one that has been away longest before the others; then
the newest runnable ones, never the oldest, so that progress is certain. Whoever loses blocks
computes them again from its row. A request that cannot fit alone ends with ``length``.
"""

from __future__ import annotations

from trserve.workers.request import Request
from trserve.workers.table import RequestTable

Plan = list[tuple[Request, int]]


def fit_to_memory(plan: Plan, table: RequestTable) -> tuple[Plan, Request | None]:
    """Give every row of ``plan`` its blocks, dropping rows from the end where they run out.

    Returns the rows that can run, and the request that cannot fit even alone, if there is one.
    """
    fitted: Plan = []
    for request, tokens in plan:
        if not _make_room(request, request.num_computed + tokens, table, fitted):
            break
        fitted.append((request, tokens))
    too_large = plan[0][0] if plan and not fitted else None
    return fitted, too_large


def _make_room(request: Request, length: int, table: RequestTable, fitted: Plan) -> bool:
    pool = table.pool
    while not pool.extend(request, length):
        victim = _victim(request, table, fitted)
        if victim is None:
            return False
        table.drop_kv(victim)
    return True


def _victim(request: Request, table: RequestTable, fitted: Plan) -> Request | None:
    pending = table.pending_with_blocks()
    if pending:
        return pending[0]
    keep = {id(request), *(id(row) for row, _ in fitted)}
    for candidate in reversed(table.runnable.values()):
        if candidate.num_blocks and id(candidate) not in keep:
            return candidate
    return None
