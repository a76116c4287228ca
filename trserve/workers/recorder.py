"""What a model computed for each token that it sampled, appended to files.

One write a step and file, into the page cache: what a step sampled can be read by the time that
anybody is told of its tokens, and survives this process. When a write fails, recording stops, says
so once, and the requests go on: no answer is worth less for what is kept beside it.

Knows no routing and no sockets; the files are described in ``trserve.record_format``.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trserve.errors import StartupError
from trserve.record_format import (
    MAX_HIDDEN,
    PROMPT_ROW,
    PROMPTS_SUFFIX,
    RecordHeader,
    mark_stopped,
    open_rows,
    rows_path,
    write_all,
)
from trserve.workers.request import Request
from trserve.workers.runner import ForwardOutput

log = logging.getLogger(__name__)


class Recorder:
    """Appends the rows of one model in one run; a successor of a killed worker goes on behind them.

    Args:
        max_rows: requests in a step at most.

    Raises:
        StartupError: the files cannot be made.
    """

    def __init__(self, directory: Path, header: RecordHeader, max_rows: int) -> None:
        self._header = header
        self._path = rows_path(directory, header)
        self._buffer = np.zeros(max_rows, header.row)
        self._noted: list[Request] = []
        self._stopped = False
        try:
            self._rows_fd = open_rows(self._path, header.row, header.encode())
            self._prompts_fd = open_rows(self._path.with_suffix(PROMPTS_SUFFIX), PROMPT_ROW)
        except OSError as error:
            raise StartupError(
                f"--record {directory}: {error.strerror} ({error.filename})"
            ) from None

    def sampled(
        self, requests: Sequence[Request], output: ForwardOutput, tokens: NDArray[np.int64]
    ) -> None:
        """Note a step's rows: ``tokens`` [B] were sampled from ``output`` for ``requests``.

        To be called before any of them is committed, and followed by :meth:`decided`. Requests
        that want no record, and rows whose logits are not finite (token -1), are left out.
        """
        self._noted = []
        if self._stopped:
            return
        kept = [row for row, r in enumerate(requests) if r.params.record and tokens[row] >= 0]
        if not kept:
            return
        logits, hidden = output.logits[:, : self._header.tokenizer_size], output.hidden
        if len(kept) < len(requests):
            logits, hidden, tokens = logits[kept], hidden[kept], tokens[kept]
        self._noted = [requests[row] for row in kept]
        self._fill(self._buffer[: len(kept)], logits, hidden, tokens)

    def _fill(
        self,
        rows: NDArray[Any],
        logits: torch.Tensor,
        hidden: torch.Tensor,
        tokens: NDArray[np.int64],
    ) -> None:
        tops = logits.topk(self._header.top_k)
        rows["request"] = [request.gen for request in self._noted]
        rows["position"] = [request.length for request in self._noted]
        rows["token"] = tokens
        rows["logit"] = logits[torch.arange(len(tokens)), torch.from_numpy(tokens)].numpy()
        rows["logsumexp"] = logits.logsumexp(-1).numpy()
        rows["top_ids"] = tops.indices.numpy()
        rows["top_logits"] = tops.values.numpy()
        rows["hidden"] = hidden.clamp(-MAX_HIDDEN, MAX_HIDDEN).numpy()

    def decided(self) -> None:
        """Write the rows that were noted, now that it shows which tokens were committed."""
        noted, self._noted = self._noted, []
        if not noted:
            return
        rows = self._buffer[: len(noted)]
        first = [r for r, at in zip(noted, rows["position"], strict=True) if at == r.prompt_len]
        rows["committed"] = [request.length for request in noted] > rows["position"]
        try:
            for request in first:
                write_all(self._prompts_fd, _prompt_rows(request))
            write_all(self._rows_fd, rows)
        except OSError as error:
            self._stop(error)

    def _stop(self, error: OSError) -> None:
        self._stopped = True
        log.error(
            "recording stopped: %s: %s; the requests go on, and what was written can be read",
            self._path,
            error.strerror,
        )
        try:
            mark_stopped(self._rows_fd)
        except OSError as failed:
            log.error("%s does not say that rows are missing: %s", self._path, failed.strerror)

    def close(self) -> None:
        """Close the files; nothing is left to write."""
        os.close(self._rows_fd)
        os.close(self._prompts_fd)


def _prompt_rows(request: Request) -> NDArray[Any]:
    rows = np.empty(request.prompt_len, PROMPT_ROW)
    rows["request"] = request.gen
    rows["position"] = np.arange(request.prompt_len)
    rows["token"] = request.token_ids[: request.prompt_len]
    return rows
