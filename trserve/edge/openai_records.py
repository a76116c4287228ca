"""Log probabilities of servers that take token ids, as annotations of rows.

vLLM has them by token, spelled ``token_id:N`` if asked so; SGLang by id. What a server does not say
is as improbable as vLLM calls what cannot be, so that nothing is left of whatever the record's
memory held. Knows answers' JSON and the words of an annotation; no slab.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from trserve.edge.cloud import Records
from trserve.edge.openai_wire import SPELLED, Dialect
from trserve.ipc.layout import record_words
from trserve.params import RequestParams

_HEAD: Final = 3
_LOGPROB, _SCORE, _ARRIVAL = range(_HEAD)
_UNKNOWN: Final = -9999.0
_HIGHEST_ID: Final = 2**31 - 1
_AT_ONCE: Final = 1 << 1
"""The first token's writer was reached in no time: what the way took is the agent's to add."""

_Pairs = list[tuple[int, float]]


def records_of(
    dialect: Dialect, answer: Any, ids: list[int], start: int, params: RequestParams
) -> Records | None:
    """Of ``ids``, which come to row ``start``; None where the request wants none."""
    if not params.annotated or not ids:
        return None
    tops = params.tops or 0
    words = np.zeros((len(ids), record_words(tops)), np.int32)
    floats = words.view(np.float32)
    floats[:, _SCORE] = np.nan
    words[0, _ARRIVAL] = _AT_ONCE
    chosen, others = _said(dialect, answer, len(ids), tops)
    for row, token in enumerate(ids):
        floats[row, _LOGPROB] = chosen[row]
        best = _best(token, chosen[row], others[row], tops)
        _fill(words[row, _HEAD:], floats[row, _HEAD:], best)
    return Records(start, words)


def _fill(ids: NDArray[np.int32], values: NDArray[np.float32], best: _Pairs) -> None:
    for place, (token, value) in enumerate(best):
        ids[place] = token
        values[len(best) + place] = value


def _best(token: int, logprob: float, others: _Pairs, tops: int) -> _Pairs:
    """The ``tops`` most probable; where fewer are said, the chosen one stands for the rest."""
    known = {each: value for each, value in others if 0 <= each <= _HIGHEST_ID}
    ordered = sorted((known or {token: logprob}).items(), key=lambda pair: -pair[1])
    return (ordered + [(token, _UNKNOWN)] * tops)[:tops]


def _said(dialect: Dialect, answer: Any, count: int, tops: int) -> tuple[list[float], list[_Pairs]]:
    """Log probabilities of the tokens, and of the most probable ones at their places."""
    try:
        generated = dialect is Dialect.GENERATE
        chosen, others = _generated(answer, tops) if generated else _completed(answer, tops)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        chosen, others = [], []
    chosen = (chosen + [_UNKNOWN] * count)[:count]
    return chosen, (others + [[] for _ in range(count)])[:count]


def _completed(answer: Any, tops: int) -> tuple[list[float], list[_Pairs]]:
    said = answer["choices"][0]["logprobs"]
    chosen = [float(value) for value in said["token_logprobs"]]
    if not tops:
        return chosen, []
    return chosen, [
        [
            (int(text.removeprefix(SPELLED)), float(value))
            for text, value in place.items()
            if text.startswith(SPELLED)
        ]
        for place in said["top_logprobs"]
    ]


def _generated(answer: Any, tops: int) -> tuple[list[float], list[_Pairs]]:
    meta = answer["meta_info"]
    chosen = [float(value) for value, *_ in meta["output_token_logprobs"]]
    if not tops:
        return chosen, []
    places = meta["output_top_logprobs"]
    return chosen, [[(int(token), float(value)) for value, token, *_ in each] for each in places]
