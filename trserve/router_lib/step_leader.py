"""Step leading: the large model begins each sentence or line, the small one finishes it.

After FoReaL-Decoding (arXiv 2506.06998), without its gate: the second model writes the first
``tokens`` tokens of the answer and of every step, the first model the rest. A step ends with a
token whose text has a line feed in it, or ends, up to spaces, quotes and brackets, with a full
stop, an exclamation or question mark or an ellipsis. (A decimal point that is a token of its own
ends one too.) Every token counts. Knows nothing of logits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trserve.gateway.tokenizer import Tokenizer
from trserve.router_lib.base import BaseRouter, PeerReq, RequestView, RouterContext, StepResult
from trserve.router_lib.registry import STEP_LEADER_PARAMETERS, TOKENIZER

_LEADER: Final = 1
_ENDS: Final = (".", "!", "?", "…", "。", "！", "？")
_CLOSING: Final = " \t\r\"'”’»)]}*"


class StepLeader(BaseRouter):
    """Two models; parameter ``tokens``, which a request may set for itself."""

    parameters = STEP_LEADER_PARAMETERS
    reads_model = False

    def __init__(self, context: RouterContext) -> None:
        super().__init__(context)
        tokenizer = Tokenizer.load(Path(context.config[TOKENIZER]).expanduser())
        texts = (tokenizer.decode([i], skip_special_tokens=True) for i in range(tokenizer.size))
        self._ends = np.array([_ends_step(text) for text in texts])

    def route(self, result: StepResult) -> list[int]:
        """To whoever writes the next token: the leader up to ``tokens`` tokens into a step."""
        rows = zip(result.requests, result.params["tokens"].tolist(), strict=True)
        return [
            int((self._next(request, tokens) == _LEADER) != self.model) for request, tokens in rows
        ]

    def send(self, req: RequestView, token: int) -> PeerReq:
        """Every token counts, the first model's too."""
        peer_req = super().send(req, token)
        peer_req.keep_token = True
        return peer_req

    def admit(self, req: RequestView) -> int:
        """The answer begins with a step."""
        return _LEADER if self.setting(req, "tokens") > 0 else 0

    def _next(self, request: RequestView, tokens: float) -> int:
        """Which model writes the token after ``request``'s row."""
        row = request.token_ids
        written = len(row) - request.prompt_len
        return _LEADER if self._into_step(row, min(written, tokens)) < tokens else 0

    def _into_step(self, row: NDArray[np.int32], most: float) -> float:
        """Tokens since the last end of a step, ``most`` if it lies further back than that."""
        first = len(row) - int(np.ceil(most))
        ends = np.flatnonzero(self._ends[row[first:]])
        return float(len(row) - first - 1 - ends[-1]) if len(ends) else most


def _ends_step(text: str) -> bool:
    return "\n" in text or text.rstrip(_CLOSING).endswith(_ENDS)
