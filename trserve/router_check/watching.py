"""A worker's routing that notes what its router is shown, says and does wrong.

Each complaint names the method, the row and the place in the text. Knows nothing of what is done
about it; the requests go on or fail exactly as in a server.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from operator import index
from pathlib import Path
from typing import Any, Final, cast

import torch
from numpy.typing import NDArray

from trserve.ipc.layout import ROUTER_EXTRAS_BYTES
from trserve.router_lib.base import BaseRouter, PeerReq, RequestView, StepResult
from trserve.workers.question import early_question
from trserve.workers.request import Request
from trserve.workers.routing import Routing

_DIGEST_BYTES: Final = 8
_GUARD: Final = "routing.py"
"""Where an answer of ``route`` is refused: not a line that its author could look at."""
_INPUTS: Final = ("logits", "hidden", "token_ids", "is_prefill")


@dataclass(frozen=True)
class Decision:
    """What the router was shown of one request after one step, and what it said.

    ``row`` is a digest of the committed tokens, ``shown`` of what the step computed for them and
    of the parameters; None in ``destination``: it failed.
    """

    model: int
    position: int
    row: bytes
    shown: bytes
    destination: int | None


@dataclass
class Notes:
    """What all workers of one run noted.

    Attributes:
        complaints: by the name of a check, in the order in which they came.
        decisions: by request's seed, in order.
        widths: how often ``route`` was asked about so many rows.
        forced: tokens that the runtime kept because two hops in a row would have committed none.
        discarded: tokens of each model that were not kept when their request left, by request.
    """

    complaints: dict[str, list[str]] = field(default_factory=dict)
    decisions: dict[int, list[Decision]] = field(default_factory=dict)
    widths: Counter[int] = field(default_factory=Counter)
    forced: int = 0
    sent: int = 0
    extras: int = 0
    received: int = 0
    scores: int = 0
    discarded: dict[int, list[int]] = field(default_factory=dict)

    def complain(self, check: str, message: str) -> None:
        """Note ``message`` under ``check``."""
        self.complaints.setdefault(check, []).append(message)


class WatchedRouting(Routing):
    """As :class:`Routing`, with its notes; ``names`` are the models', ``scored``: scores too."""

    def __init__(
        self, router: BaseRouter, notes: Notes, names: Sequence[str], *, scored: bool = False
    ) -> None:
        super().__init__(router)
        self._notes = notes
        self._scored = scored
        self._where = f"model {router.model} ({names[router.model]})"
        self._models = range(len(names))
        # Asked for every request, whatever the class says for itself.
        self._calls_receive = self.asks_on_arrival = True

    # -- route -----------------------------------------------------------------------------------

    def destinations(self, result: StepResult) -> Sequence[int | None]:
        """As a server's; a failure is noted with the rows that fail by themselves."""
        self._notes.widths[len(result.requests)] += 1
        if self._scored:
            self._ask_score(result)
        shown = [_shown(result, row) for row in range(len(result.requests))]
        before = {name: values.clone() for name, values in _tensors(result).items()}
        found: Sequence[int | None]
        try:
            found = self._ask(result)
            if self.decides_early:
                self._check_early(result, found)
        except Exception as error:
            found = self._ask_each(result, error)
        self._check_unchanged(result, before)
        for row, request in enumerate(result.requests):
            decision = Decision(
                model=self.router.model,
                position=request.committed_len - request.prompt_len,
                row=_digest(request.token_ids[: request.committed_len]),
                shown=shown[row],
                destination=found[row],
            )
            self._notes.decisions.setdefault(_seed(request), []).append(decision)
        return found

    def _ask_each(self, result: StepResult, error: Exception) -> list[int | None]:
        """Which rows the failure is of."""
        found: list[int | None] = []
        for row, request in enumerate(result.requests):
            try:
                found.append(self._ask(result.row(row))[0])
            except Exception as own:
                found.append(None)
                rows = f"row {row} of {len(result.requests)}"
                self._notes.complain("route", f"{rows}, {self._place(request)}: {described(own)}")
        if None not in found:
            self._notes.complain(
                "route",
                f"{self._where}, {len(found)} rows: {described(error)}; each row alone is decided",
            )
        return found

    def _check_early(self, result: StepResult, found: Sequence[int | None]) -> None:
        """Whether it says the same before there is anything of the step to be seen."""
        requests = cast("list[Request]", result.requests)
        shown = [request.visible for request in requests]
        for request in requests:
            request.visible = request.length
        try:
            early: Sequence[int | None] | str = self._ask(
                early_question(result.params, requests, result.is_prefill)
            )
        except Exception as error:
            early = described(error)
        for request, visible in zip(requests, shown, strict=True):
            request.visible = visible
        if early != found:
            self._notes.complain(
                "route",
                f"{self._where}: decides_early, but while the step is computed it says {early} "
                f"and after it {found}",
            )

    def _check_unchanged(self, result: StepResult, before: dict[str, torch.Tensor]) -> None:
        after = _tensors(result)
        for name, values in before.items():
            if name not in after or not torch.equal(values, after[name]):
                self._notes.complain("route", f"{self._where}: it writes into result.{name}")

    # -- score, send, receive, admit -------------------------------------------------------------

    def _ask_score(self, result: StepResult) -> None:
        try:
            scores = self.router.score(result)
        except Exception as error:
            self._notes.complain("score", f"{self._where}: {described(error)}")
            return
        if scores is None:
            return
        if not isinstance(scores, torch.Tensor) or scores.shape != (len(result.requests),):
            shape = list(scores.shape) if isinstance(scores, torch.Tensor) else scores
            self._notes.complain(
                "score",
                f"{self._where}: returned {shape!r} for {len(result.requests)} rows, expected a "
                "tensor with one number a row",
            )
            return
        self._notes.scores += len(scores)

    def send(self, request: Request, token: int) -> tuple[bool, bytes] | None:
        """As a server's, asked for every request."""
        self._notes.sent += 1
        try:
            peer_req = self.router.send(request, token)
            complaint = _wrong_in(peer_req, request)
        except Exception as error:
            self._notes.complain("handoff", f"send, {self._place(request)}: {described(error)}")
            return None
        if complaint:
            self._notes.complain("handoff", f"send, {self._place(request)}: {complaint}")
        if not isinstance(peer_req.extras, bytes) or len(peer_req.extras) > ROUTER_EXTRAS_BYTES:
            return None
        keeps = bool(peer_req.keep_token)
        self._notes.extras = max(self._notes.extras, len(peer_req.extras))
        self._count(request, token, keeps=keeps)
        return keeps, peer_req.extras

    def _count(self, request: Request, token: int, *, keeps: bool) -> None:
        if keeps:
            return
        if request.arrived_empty and request.length == request.arrival_length:
            self._notes.forced += 1
        else:
            self._notes.discarded.setdefault(_seed(request), []).append(token)

    def receive(self, request: Request) -> bool:
        """As a server's, asked for every request."""
        self._notes.received += 1
        peer_req = PeerReq(
            rid=request.rid,
            token_ids=request.token_ids[request.num_computed :],
            loc=request.committed_len,
            keep_token=False,
            extras=request.extras,
        )
        try:
            self.router.receive(peer_req)
        except Exception as error:
            self._notes.complain("handoff", f"receive, {self._place(request)}: {described(error)}")
            return False
        return True

    def admit(self, request: Request) -> int | None:
        """As a server's."""
        try:
            model = index(self.router.admit(request))
        except Exception as error:
            self._notes.complain("admit", f"{self._place(request)}: {described(error)}")
            return None
        if model not in self._models:
            self._notes.complain(
                "admit", f"returned {model}; the models are 0 to {self._models[-1]}"
            )
            return None
        return model

    def _place(self, request: RequestView) -> str:
        return f"token {request.committed_len - request.prompt_len} at {self._where}"


def described(error: BaseException) -> str:
    """The error, and the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    own = bool(frames) and Path(frames[-1].filename).name == _GUARD
    line = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames and not own else ""
    return f"{type(error).__name__}: {error}{line}"


def _wrong_in(peer_req: Any, request: RequestView) -> str | None:
    """What of ``peer_req`` breaks the contract."""
    if not isinstance(peer_req, PeerReq):
        return f"returned {peer_req!r}, expected a PeerReq"
    if peer_req.rid != request.rid:
        return f"rid is {peer_req.rid}, the request's is {request.rid}"
    extras: Any = peer_req.extras
    length = request.committed_len
    if not isinstance(extras, bytes):
        return f"extras must be bytes, not {type(extras).__name__}"
    if len(extras) > ROUTER_EXTRAS_BYTES:
        return f"extras of {len(extras)} bytes; {ROUTER_EXTRAS_BYTES} at most"
    if peer_req.loc not in (length, length + bool(peer_req.keep_token)):
        return (
            f"loc is {peer_req.loc}, but {length} tokens are committed and keep_token is "
            f"{peer_req.keep_token}"
        )
    start, suffix = peer_req.loc - len(peer_req.token_ids), list(peer_req.token_ids)
    if start < 0 or suffix != request.token_ids[start : peer_req.loc].tolist():
        return f"token_ids ({len(suffix)}) are not the row's tokens up to loc {peer_req.loc}"
    return None


def _tensors(result: StepResult) -> dict[str, torch.Tensor]:
    """What a router is shown, by the name that its author has for it."""
    found = {name: getattr(result, name) for name in _INPUTS}
    return found | {f"params[{name!r}]": values for name, values in result.params.items()}


def _shown(result: StepResult, row: int) -> bytes:
    tensors = [result.logits, result.hidden, result.token_ids]
    tensors += [result.params[name] for name in sorted(result.params)]
    return _digest(*(tensor[row].contiguous().numpy() for tensor in tensors))


def _digest(*arrays: NDArray[Any]) -> bytes:
    found = blake2b(digest_size=_DIGEST_BYTES)
    for array in arrays:
        found.update(array.tobytes())
    return found.digest()


def _seed(request: RequestView) -> int:
    return request.params.sampling.seed
