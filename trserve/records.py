"""Recordings, read: what ``trserve.Engine(record=DIR)`` and ``trserve launch --record DIR`` wrote.

``for request in Recording(DIR)`` gives each request once, with its prompt, its answer, and for
every model the rows of the tokens that it sampled: hidden states and the logits of the most
probable tokens, as routers are trained on. What does not belong to the answer is left out: torn
rows, rows that a later one replaced, tokens beyond a stop string, and, unless they are asked for,
tokens that the router discarded. Files are mapped; rows are copied when they are asked for.

Knows no torch and nothing of a running instance.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trserve.errors import ConfigError
from trserve.record_format import (
    END_ROW,
    ENDS_SUFFIX,
    FINISH_REASONS,
    HEADER_BYTES,
    PROMPT_ROW,
    PROMPTS_SUFFIX,
    ROWS_SUFFIX,
    has_stopped,
    headers_in,
    read_rows,
    rows_path,
)


class ModelRows(NamedTuple):
    """Tokens that one model sampled for one request, by rising position; R rows.

    Attributes:
        positions: [R] int64, index in the answer; the answer's ``token_ids[positions]`` is what
            was committed there in the end.
        token_ids: [R] int32, what this model sampled.
        committed: [R] bool, whether that became part of the answer.
        logits: [R] float32, raw logit of the sampled token.
        logsumexp: [R] float32, of all raw logits; a logit minus this is a log probability.
        top_ids: [R, k] int32, the most probable tokens, falling.
        top_logits: [R, k] float32, their raw logits.
        hidden: [R, H] float16, state after the final norm that the logits came from.
    """

    positions: NDArray[np.int64]
    token_ids: NDArray[np.int32]
    committed: NDArray[np.bool_]
    logits: NDArray[np.float32]
    logsumexp: NDArray[np.float32]
    top_ids: NDArray[np.int32]
    top_logits: NDArray[np.float32]
    hidden: NDArray[np.float16]

    @property
    def top_logprobs(self) -> NDArray[np.float32]:
        """[R, k] log probabilities of ``top_ids``, before temperature."""
        return self.top_logits - self.logsumexp[:, None]


@dataclass(frozen=True, eq=False)
class RequestRecord:
    """One request.

    Attributes:
        request_id: as ``Completion.request_id``.
        models: names; indices as in ``sources``.
        prompt_ids: [P] int32.
        token_ids: [N] int32, the answer as far as every row of it is there.
        sources: [N] int64, index of the model that wrote each token.
        finish_reason: ``stop``, ``length``, ``abort``, or ``left`` where the caller went away;
            None where the end is not recorded: over HTTP, where the request failed, or where the
            program ended before.
        complete: whether ``token_ids`` is all that was delivered (where the end is not recorded:
            all that was committed).
    """

    request_id: str
    models: tuple[str, ...]
    prompt_ids: NDArray[np.int32]
    token_ids: NDArray[np.int32]
    sources: NDArray[np.int64]
    finish_reason: str | None
    complete: bool
    _rows: tuple[NDArray[Any], ...] = field(repr=False)
    _indices: tuple[NDArray[np.intp], ...] = field(repr=False)

    def rows(self, model: int | str, *, discarded: bool = False) -> ModelRows:
        """What ``model`` (index or name) sampled for the positions of ``token_ids``.

        Args:
            discarded: also the tokens that were thrown away because a peer wrote instead.
        """
        index = self.models.index(model) if isinstance(model, str) else model
        rows = self._rows[index][self._indices[index]]
        positions = rows["position"].astype(np.int64) - len(self.prompt_ids)
        kept = positions < len(self.token_ids)
        if not discarded:
            kept &= rows["committed"] == 1
        rows = rows[kept]
        return ModelRows(
            positions[kept],
            rows["token"].copy(),
            rows["committed"] == 1,
            rows["logit"].copy(),
            rows["logsumexp"].copy(),
            rows["top_ids"].copy(),
            rows["top_logits"].copy(),
            rows["hidden"].copy(),
        )


class Recording:
    """The requests in a directory of records; iterate over it, as often as is needed.

    Attributes:
        models: names of the models, in the order of their indices.
        problems: what is missing, in words; empty where everything was recorded.

    Raises:
        ConfigError: the directory holds no records, or some that do not belong together.
    """

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory)
        headers = headers_in(self._directory)
        if not headers:
            raise ConfigError(f"{directory} holds no records")
        self._shapes = {header.index: header for header in headers}
        self._any_shape = headers[0]
        for header in headers:
            if not header.describes_the_same(self._shapes[header.index]):
                raise ConfigError(f"{directory} holds records of different models or shapes")
        self._runs = sorted({header.run for header in headers})
        self.models = tuple(headers[0].models)
        self.problems = [
            f"run {h.run}: recording of {self.models[h.index]} stopped early (a write failed)"
            for h in headers
            if has_stopped(rows_path(self._directory, h))
        ]

    def __iter__(self) -> Iterator[RequestRecord]:
        for run in self._runs:
            yield from self._read_run(run)

    def _read_run(self, run: str) -> Iterator[RequestRecord]:
        rows, prompts = [], []
        for index in range(len(self.models)):
            path = self._directory / f"{run}.{index}{ROWS_SUFFIX}"
            # Of a model that never wrote there is no shape, and there are no rows.
            row = self._shapes.get(index, self._any_shape).row
            rows.append(read_rows(path, row, start=HEADER_BYTES))
            prompts.append(read_rows(path.with_suffix(PROMPTS_SUFFIX), PROMPT_ROW))
        prompt_rows = np.concatenate(prompts)
        prompt_indices = _by_request(prompt_rows)
        indices = [_by_request(each) for each in rows]
        ends = {
            int(end["request"]): end
            for end in read_rows(self._directory / f"{run}{ENDS_SUFFIX}", END_ROW)
        }
        nothing = np.empty(0, np.intp)
        for request in sorted(set().union(*indices)):
            prompt = prompt_rows[prompt_indices.get(request, nothing)]["token"]
            own = tuple(found.get(request, nothing) for found in indices)
            yield self._join(run, request, prompt, tuple(rows), own, ends.get(request))

    def _join(
        self,
        run: str,
        request: int,
        prompt: NDArray[np.int32],
        rows: tuple[NDArray[Any], ...],
        indices: tuple[NDArray[np.intp], ...],
        end: Any,
    ) -> RequestRecord:
        tokens, sources, whole = _committed(rows, indices, len(prompt))
        count = len(tokens) if end is None else min(len(tokens), int(end["tokens"]))
        return RequestRecord(
            request_id=f"{run}:{request}",
            models=self.models,
            prompt_ids=prompt,
            token_ids=tokens[:count],
            sources=sources[:count],
            finish_reason=None if end is None else FINISH_REASONS[int(end["finish"])],
            complete=whole if end is None else count == int(end["tokens"]),
            _rows=rows,
            _indices=indices,
        )


def _by_request(rows: NDArray[Any]) -> dict[int, NDArray[np.intp]]:
    """Indices of each request's rows by rising position, of equal ones the last.

    A row is there twice where a position was sampled again, by a successor of a killed worker say;
    the later one is what counted.
    """
    requests, positions = np.array(rows["request"]), np.array(rows["position"])
    order = np.lexsort((positions, requests))  # stable: the later row of two stays behind
    requests, positions = requests[order], positions[order]
    last = np.ones(len(order), np.bool_)
    last[:-1] = (requests[1:] != requests[:-1]) | (positions[1:] != positions[:-1])
    order, requests = order[last], requests[last]
    names, starts = np.unique(requests, return_index=True)
    return dict(zip(names.tolist(), np.split(order, starts[1:]), strict=True)) if len(names) else {}


def _committed(
    rows: tuple[NDArray[Any], ...], indices: tuple[NDArray[np.intp], ...], prompt_len: int
) -> tuple[NDArray[np.int32], NDArray[np.int64], bool]:
    """The committed tokens from the first on and who wrote them, up to a gap; was there none?"""
    positions, tokens, sources = [], [], []
    for model, (own, at) in enumerate(zip(rows, indices, strict=True)):
        at = at[own["committed"][at] == 1]
        positions.append(own["position"][at].astype(np.int64) - prompt_len)
        tokens.append(own["token"][at])
        sources.append(np.full(len(at), model))
    order = np.argsort(np.concatenate(positions), kind="stable")
    place = np.concatenate(positions)[order]
    gaps = np.flatnonzero(place != np.arange(len(place)))
    count = int(gaps[0]) if len(gaps) else len(place)
    found = order[:count]
    return np.concatenate(tokens)[found], np.concatenate(sources)[found], not len(gaps)
