"""Visits as a link agent makes them."""

import numpy as np

from trserve.edge.cloud import Visit
from trserve.params import RequestParams, SamplingParams

END = 7


def visit(
    row, *, session=1, hop=1, prompt_len=None, limit=64, router=None, pinned=False, **sampling
):
    """A visit of ``row``; sampling is greedy, and :data:`END` ends it, unless said otherwise."""
    given = {"temperature": 0.0, "eos_token_ids": (END,), **sampling}
    params = RequestParams(sampling=SamplingParams(**given), router=router or {}, pinned=pinned)
    return Visit(
        session=session,
        hop=hop,
        row=np.array(row, np.int32),
        prompt_len=len(row) if prompt_len is None else prompt_len,
        limit=limit,
        params=params,
        left=(len(row), 0),
    )
