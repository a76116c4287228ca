"""The interface of a router: three short functions about one request. Knows no processes.

``route`` is asked after every step of this worker's model and decides, per request, whether the
next token is worth another model; ``send`` says what leaves with a request, ``receive`` takes in
what arrives. A router instance lives in one worker; it never sees the other workers' instances.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trserve.router_lib.parameters import Parameter, ServerParameter, TextParameter

if TYPE_CHECKING:
    import torch

    from trserve.params import RequestParams

    Destinations: TypeAlias = torch.Tensor | NDArray[np.integer] | Sequence[int]


class RequestView(Protocol):
    """A request as routers see it; valid during the call only, and read-only.

    ``token_ids`` is int32: what is committed, plus the token just sampled (in ``route`` and
    ``send``). ``peer_locs[k]`` is the committed length of the row when the k-th peer last gave the
    request away, 0 if it never had it; it is right from the first call on, whoever was restarted.
    """

    @property
    def rid(self) -> int:
        """The request's id; never reused within a server."""

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """Prompt, then output."""

    @property
    def committed_len(self) -> int:
        """Tokens that are final, prompt included."""

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""

    @property
    def peer_locs(self) -> Sequence[int]:
        """Length of the row when each peer last had it; index 0 is this worker, and 0."""

    @property
    def finished(self) -> bool:
        """Whether the request is over."""

    @property
    def extras(self) -> bytes:
        """The router's own bytes that came with the request (at most 64)."""

    @property
    def params(self) -> RequestParams:
        """What the request asks for: ``sampling`` with its seed, ``router`` with its own values."""


@dataclass(slots=True)
class StepResult:
    """What one step computed for the B requests that are due for a decision.

    The tensors lie in buffers that the next step overwrites; copy what is to be kept, and write
    into none of them.

    Attributes:
        logits: float32 [B, V], raw (before temperature and penalties); columns past the
            tokenizer are -inf.
        hidden: [B, H], the last hidden state of each request's last position, after the final norm.
        token_ids: int64 [B], the tokens sampled from ``logits``.
        params: float32 [B] by parameter name: each request's router parameters.
        requests: the B requests.
        is_prefill: bool [B], whether the step computed prompt tokens of the request.
        tap: float32 [B, H], what the last layer's MLP read at each request's last position (the
            hidden state after attention, normalised); None unless the router ``reads_tap``.
    """

    logits: torch.Tensor
    hidden: torch.Tensor
    token_ids: torch.Tensor
    params: Mapping[str, torch.Tensor]
    requests: Sequence[RequestView]
    is_prefill: torch.Tensor
    tap: torch.Tensor | None = None

    def row(self, index: int) -> StepResult:
        """The result of one request alone, B = 1."""
        only = slice(index, index + 1)
        return StepResult(
            logits=self.logits[only],
            hidden=self.hidden[only],
            token_ids=self.token_ids[only],
            params={name: values[only] for name, values in self.params.items()},
            requests=self.requests[only],
            is_prefill=self.is_prefill[only],
            tap=None if self.tap is None else self.tap[only],
        )


@dataclass(slots=True)
class PeerReq:
    """A request on its way to another worker.

    Attributes:
        rid: the request.
        token_ids: int32, the suffix that the receiver has not seen, up to ``loc``.
        loc: the committed length when the request was sent.
        keep_token: whether the token just sampled counts. Committed by the sender if so.
        finished, finish_reason: set when the request is over.
        n_gen: how many tokens the receiver is asked for before it returns; 0: it decides.
        extras: the algorithm's own bytes, at most 64.
    """

    rid: int
    token_ids: NDArray[np.int32]
    loc: int
    keep_token: bool
    finished: bool = False
    finish_reason: str | None = None
    n_gen: int = 0
    extras: bytes = b""


@dataclass(frozen=True)
class RouterContext:
    """Where a router instance lives.

    ``model`` is the index of this worker's model among ``models`` (entry first);
    ``tokenizer_size`` the number of ids that the tokenizer has; ``config`` the values of
    ``--router-config``, complete with defaults: a float for a ``Parameter``, a str for a
    ``TextParameter``. ``path`` is where this worker's model lies, ``embedding`` [V, H] its input
    embedding as it was loaded, on the model's device; None where no model was.
    """

    model: int
    models: tuple[str, ...]
    tokenizer_size: int
    config: Mapping[str, Any]
    path: str = ""
    embedding: torch.Tensor | None = None


class BaseRouter(ABC):
    """Base of all routers. Subclasses implement ``route``; the rest has sensible defaults.

    ``parameters`` is what the class takes. An instance's own are the numbers among them: those
    that a step has a tensor of (``StepResult.params``) and that a request may set. ``above`` says
    on which side of the first parameter a ``score`` hands a token on, so that
    ``target_share`` can move it; None: on neither. ``reads_tap``: whether steps have to give
    ``StepResult.tap``, asked once, after the start. ``reads_model``: whether ``route`` and
    ``score`` look at ``logits``, ``hidden`` or ``tap`` at all; else they may stay on a device.

    ``capturable``: that a device may decide within its step, as part of a CUDA graph. It promises
    that ``route`` sends a request to its first peer where ``crosses(score, bounds)``, and nowhere
    else; that ``score`` and ``crosses`` are operations on tensors alone, and ``score`` reads no
    more of a result than ``logits``, ``hidden``, ``tap`` and ``token_ids``: no value is asked for
    (``.item()``, ``.tolist()``, ``if``), no request, no parameter. Where ``score`` is None, the
    host asks ``route``. A subclass that overrides any of these declares it anew.

    ``decides_early``: that ``route`` may be asked while the step is still computed. It promises to
    look at nothing of a result but ``params``, ``is_prefill`` and ``requests``, whose rows are
    without the token just sampled then. (``logits`` and ``hidden`` have no columns, the result's
    own ``token_ids`` are -1, ``tap`` is None.) Declared anew as above.
    """

    parameters: tuple[Parameter, ...] = ()
    above: ClassVar[bool | None] = None
    reads_tap: bool = False
    reads_model: bool = True
    capturable: ClassVar[bool] = False
    decides_early: ClassVar[bool] = False

    def __init__(self, context: RouterContext) -> None:
        self.context = context
        self.parameters = tuple(
            each
            for each in type(self).parameters
            if not isinstance(each, TextParameter | ServerParameter)
        )
        self.model = context.model
        self.peers = tuple(m for m in range(len(context.models)) if m != context.model)

    def peer(self, model: int) -> int:
        """The k for which ``route`` sends a request to ``model``. ValueError for this worker's."""
        return self.peers.index(model) + 1

    def setting(self, req: RequestView, name: str) -> float:
        """The parameter ``name`` for ``req``: its own value, or the server's."""
        return float(req.params.router.get(name, self.context.config[name]))

    @abstractmethod
    def route(self, result: StepResult) -> Destinations:
        """Where each request of the step goes: 0 stays, k goes to the k-th peer.

        The peers of a model are the other models in the order of ``--models``.
        """

    def score(self, result: StepResult) -> torch.Tensor | None:
        """What ``route`` decides on, float32 [B], for traces; None if that is no one number."""
        return None

    def bounds(
        self, params: Mapping[str, torch.Tensor], requests: Sequence[RequestView]
    ) -> torch.Tensor:
        """float32 [B]: what each request's ``score`` is compared with; known before the step.

        Asked of a ``capturable`` router alone; the first parameter, unless overridden.

        Args:
            params: as in ``StepResult``, on the host.
        """
        return params[self.parameters[0].name]

    def crosses(self, score: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
        """bool [B]: which requests go to the first peer; see ``capturable``. False for NaN.

        Args:
            bounds: those of :meth:`bounds`, as float32 or in float64, where ``score`` is.
        """
        return score > bounds if self.above else score < bounds

    def to(self, device: torch.device) -> None:  # noqa: B027  (most have nothing to move)
        """Move to ``device`` the tensors that ``score`` reads, if it is ``capturable``."""

    def send(self, req: RequestView, token: int) -> PeerReq:
        """What leaves with a routed request; ``token`` is the one just sampled.

        By default the token counts at every model but the first: a small model's uncertain token
        is replaced, a large model's token is what it was asked for.
        """
        return PeerReq(
            rid=req.rid,
            token_ids=req.token_ids[: req.committed_len],
            loc=req.committed_len,
            keep_token=self.model != 0,
        )

    def receive(self, peer_req: PeerReq) -> None:  # noqa: B027  (a hook, not a duty)
        """Take in an arriving request. The row holds its tokens already; nothing to append."""

    def admit(self, req: RequestView) -> int:
        """Which model writes first, asked in the entry worker before any prefill."""
        return self.model
