"""The forward passes of a model on ONNX Runtime, in the place of ``workers.runner.TorchRunner``.

The rows of a step run one after another: an edge device has few, and a run appends to one row's
caches in place. A request that comes back from another model has its KV, and only appends what was
written there. Knows sessions, rows and the step's arrays; nothing of requests, sampling or routing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from numpy.typing import NDArray

from trserve.edge.onnx.files import GRAPH, HEAD, read_manifest
from trserve.edge.onnx.kv_rows import KVRows
from trserve.edge.onnx.rows import Floats, Ids, Row
from trserve.edge.onnx.session import open_session
from trserve.edge.onnx.stored import exported
from trserve.errors import ConfigError
from trserve.models.aliases import ResolvedModel
from trserve.models.assembly import UNMAPPED, Progress
from trserve.models.spec import ModelSpec, read_spec
from trserve.models.token_map import TokenMap
from trserve.plan import ServerPlan
from trserve.workers.runner import ForwardOutput
from trserve.workers.step import StepInputs

if TYPE_CHECKING:
    import onnxruntime

CHUNK: Final = 256
"""Tokens of a row computed at once. Attention's scores take heads x chunk x capacity numbers, and a
sign of life is given between two chunks."""


class OnnxRunner:
    """Takes the place of ``TorchRunner``: a KV block is a whole row.

    Args:
        path: a directory that ``trserve export-onnx`` wrote.
        rows: rows that are held at once (``num_blocks``).
        capacity: tokens of each (``block_size``).
        max_rows: rows of one step.
        tokenizer_size: ids that the tokenizer has; columns beyond it are minus infinity.
        token_map: which rows of the model stand for which of the server's ids.

    Attributes:
        on_layer: called before each run of a row: this worker is not hung.
        heartbeat, began_ns: unused.

    Raises:
        ModelUnavailableError: the graph is damaged, or the runtime is not here.
    """

    def __init__(
        self,
        path: Path,
        spec: ModelSpec,
        *,
        rows: int,
        capacity: int,
        max_rows: int,
        threads: int,
        tokenizer_size: int,
        token_map: TokenMap = UNMAPPED,
    ) -> None:
        self.heartbeat = 0
        self.began_ns = 0
        self.on_layer: Callable[[], None] = _nothing_more
        self._path, self._threads = path, threads
        self._session = open_session(path / GRAPH, threads)
        self._kv = KVRows(spec, rows=rows, capacity=capacity)
        self._rows: dict[int, Row] = {}
        self._keeps_tap = False
        self._columns = _Columns(spec.vocab_size, tokenizer_size, token_map)
        self._logits = np.zeros((max_rows, spec.vocab_size), np.float32)
        self._hidden = np.zeros((max_rows, spec.hidden_size), np.float32)
        self._tap = np.zeros_like(self._hidden)
        self._outputs = [self._output(count) for count in range(max_rows + 1)]
        # Ids must lie where they are bound; most runs are of one token.
        self._ids = np.zeros(CHUNK, np.int64)
        self._wanted = np.zeros(1, np.int64)
        self._head: onnxruntime.InferenceSession | None = None

    def keep_tap(self) -> None:
        """Give ``tap`` with every step from now on."""
        self._keeps_tap = True
        self._rows.clear()
        self._outputs = [self._output(count) for count in range(len(self._outputs))]

    def _output(self, count: int) -> ForwardOutput:
        """Of a step of so many rows; every step shares the same memory."""
        tap = torch.from_numpy(self._tap[:count]) if self._keeps_tap else None
        logits, hidden = self._logits[:count], self._hidden[:count]
        return ForwardOutput(torch.from_numpy(logits), torch.from_numpy(hidden), tap=tap)

    def forward(self, step: StepInputs, also: NDArray[np.int64] | None = None) -> ForwardOutput:
        """As ``TorchRunner.forward``; what is returned is overwritten by the next call."""
        further = None if also is None else np.zeros((len(also), self._hidden.shape[1]), np.float32)
        for row in range(step.num_rows):
            self._run_row(step, row, also, further)
        count = step.num_rows
        self._columns.put_in_order(self._logits[:count])
        output = self._outputs[count]
        if further is None:
            return output
        return ForwardOutput(output.logits, output.hidden, torch.from_numpy(further), output.tap)

    def _run_row(
        self, step: StepInputs, row: int, also: Ids | None, further: Floats | None
    ) -> None:
        first, end = int(step.query_start[row]), int(step.query_start[row + 1])
        length = int(step.kv_len[row]) - (end - first)
        own = self._row(int(step.block_tables[row, 0]))
        for start in range(first, end, CHUNK):
            stop = min(start + CHUNK, end)
            length += stop - start
            ids = self._ids[: stop - start]
            self._columns.to_rows(step.token_ids[start:stop], ids)
            self.on_layer()
            places = _within(also, start, stop) if also is not None else None
            if places is None or not len(places):
                self._wanted[0] = stop - start - 1
                self._run(own, row, ids, length)
            else:
                assert also is not None and further is not None
                wanted = also[places] - start
                further[places] = self._run_wanted(own, row, ids, length, wanted)

    def _run(self, own: Row, row: int, ids: Ids, length: int) -> None:
        one = slice(row, row + 1)
        tap = self._tap[one] if self._keeps_tap else None
        own.run(ids, length, self._wanted, self._logits[row], self._hidden[one], tap)

    def _run_wanted(self, own: Row, row: int, ids: Ids, length: int, wanted: Ids) -> Floats:
        """The hidden states of ``wanted``, and those of the last token where they belong."""
        wanted = np.append(wanted, len(ids) - 1)
        hidden = np.empty((len(wanted), self._hidden.shape[1]), np.float32)
        tap = np.empty_like(hidden) if self._keeps_tap else None
        own.run(ids, length, wanted, self._logits[row], hidden, tap)
        self._hidden[row] = hidden[-1]
        if tap is not None:
            self._tap[row] = tap[-1]
        return hidden[:-1]

    def _row(self, block: int) -> Row:
        found = self._rows.get(block)
        if found is None:
            found = Row(self._session, self._kv, block)
            self._rows[block] = found
        return found

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Raw logits of hidden states after the final norm, as in :class:`ForwardOutput`.

        By a graph of the head alone, which is loaded when the first prompt is scored.
        """
        if self._head is None:
            self._head = open_session(self._path / HEAD, self._threads)
        (logits,) = self._head.run(["logits"], {"hidden": hidden.numpy()})
        self._columns.put_in_order(logits)
        return torch.from_numpy(logits)


class _Columns:
    """From the server's ids to the model's rows, and of its logits back."""

    def __init__(self, rows: int, tokenizer_size: int, token_map: TokenMap) -> None:
        pairs = np.array(token_map.moved, np.int64).reshape(-1, 2)
        self._moved, self._places = pairs[:, 0], pairs[:, 1]
        self._row_of: Ids | None = None
        if len(pairs):
            self._row_of = np.arange(rows)
            self._row_of[self._moved] = self._places
        self._absent = np.array(token_map.absent, np.int64)
        self._size = tokenizer_size

    def to_rows(self, ids: Ids, out: Ids) -> None:
        """Write the model's rows of ``ids`` to ``out``."""
        out[:] = ids if self._row_of is None else self._row_of[ids]

    def put_in_order(self, logits: Floats) -> None:
        """Put ``logits`` [n, V] in the order of the server's ids; what is no token is removed."""
        if self._row_of is not None:
            logits[:, self._moved] = logits[:, self._places]
        if len(self._absent):
            logits[:, self._absent] = -np.inf
        logits[:, self._size :] = -np.inf


def _within(indices: Ids, start: int, stop: int) -> Ids:
    """Places in ``indices`` of those from ``start`` to ``stop``."""
    return np.flatnonzero((indices >= start) & (indices < stop))


def create_runner(plan: ServerPlan, index: int, progress: Progress) -> OnnxRunner:
    """The runner of ``plan``'s model ``index``, which is exported first if it is not.

    Raises:
        ModelUnavailableError: it cannot be exported or run.
        ConfigError: the export has other positions or another precision than the plan asks for.
    """
    model = plan.models[index]
    torch.set_num_threads(1)  # samples and routes
    path = Path(model.path)
    spec = read_spec(path)
    # Its tokenizer is none of a worker's business.
    found = ResolvedModel(model.name, path, spec, path, own_tokenizer=False)
    directory = exported(
        found,
        int8=model.int8,
        load_format=model.load_format,
        threads=model.threads,
        progress=progress,
    )
    positions = read_manifest(directory).positions
    if model.max_model_len > positions:
        raise ConfigError(
            f"--max-model-len {model.max_model_len}: {directory} was exported for rows of "
            f"{positions} tokens"
        )
    return OnnxRunner(
        directory,
        spec,
        rows=model.num_blocks,
        capacity=plan.block_size,
        max_rows=plan.max_rows,
        threads=model.threads,
        tokenizer_size=plan.tokenizer_size,
        token_map=model.token_map,
    )


def _nothing_more() -> None:
    """Nobody waits for a sign of life."""
