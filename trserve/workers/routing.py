"""Asking the router, and surviving it. Knows no slab, no KV and no model.

A router is somebody's code: it may raise, or return something that is no destination. The batch
is then asked row by row, once, and only the rows that fail by themselves fail their requests.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import index
from time import monotonic
from typing import Final

import numpy as np
import torch
from msgspec.structs import asdict
from numpy.typing import NDArray

from trserve.errors import ConfigError
from trserve.ipc.layout import ROUTER_EXTRAS_BYTES
from trserve.limited_log import LimitedLog
from trserve.router_lib.base import BaseRouter, PeerReq, RequestView, RouterContext, StepResult
from trserve.router_lib.parameters import check_values
from trserve.router_lib.promises import decides_early
from trserve.router_lib.registry import load_router_class
from trserve.router_lib.target_share import ShareControl
from trserve.workers.question import own_params
from trserve.workers.request import Request

log = logging.getLogger(__name__)
_ARRAYS = (torch.Tensor, np.ndarray)
_INFINITE = (math.inf, -math.inf)
_LIBRARY: Final = "trserve.router_lib."


def _nobody_counts(hook: str) -> None:
    """Nobody wants to know how often a hook failed."""


def create_router(name: str, context: RouterContext) -> BaseRouter:
    """The router ``name`` for one worker, its configuration completed with defaults.

    Raises ConfigError if it cannot be made.
    """
    router_class = load_router_class(name)
    context = replace(context, config=_complete(name, router_class, context.config))
    try:
        return router_class(context)
    except ConfigError as error:  # says itself what is wrong
        raise ConfigError(f"--router {name}: {error}") from error
    except Exception as error:
        raise ConfigError(f"--router {name} failed to start: {error!r}") from error


def _complete(
    name: str, router_class: type[BaseRouter], given: Mapping[str, float]
) -> dict[str, float]:
    parameters = router_class.parameters
    if problem := check_values(given, name, parameters):
        raise ConfigError(f"--router-config: {problem}")
    values = {p.name: p.default for p in parameters if p.default is not None} | dict(given)
    if missing := [p.name for p in parameters if p.name not in values]:
        raise ConfigError(f"--router {name} needs --router-config {missing[0]}=...")
    return values


class Routing:
    """A worker's router, with its per-request parameters and the guard around it.

    Args:
        control: moves the server's threshold before each step is decided, if a share is wanted.

    Attributes:
        on_failure: called with the hook (``route``, ``send``, ...) that failed.
        decides_early: whether it may be asked while a step is computed.
        may_write: whether it is somebody's code that may write into the tensors it is shown. It
            gets some of its own then, which takes microseconds in each step.
    """

    def __init__(self, router: BaseRouter, control: ShareControl | None = None) -> None:
        self.router = router
        self._control = control
        self.decides_early = control is None and decides_early(router)
        self.may_write = not type(router).__module__.startswith(_LIBRARY)
        self._valid = frozenset(range(1 + len(router.peers)))
        self._names = [parameter.name for parameter in router.parameters]
        self.on_failure: Callable[[str], None] = _nobody_counts
        # A router that fails does so in every step.
        self._of_batches, self._of_requests = LimitedLog(log), LimitedLog(log)
        # What the default says needs no request, and no view of its row.
        self._says_by_default = (router.model != 0, b"")
        self._calls_send = type(router).send is not BaseRouter.send
        self._calls_receive = type(router).receive is not BaseRouter.receive
        self._has_score = type(router).score is not BaseRouter.score
        self.asks_admit = type(router).admit is not BaseRouter.admit
        self.asks_on_arrival = self._calls_receive or self.asks_admit

    def describe(self) -> list[dict[str, object]]:
        """The router's parameters as the control plane carries them; JSON has no infinity.

        ``value`` is the server's own at the moment.
        """
        config = self.router.context.config
        return [
            {name: value for name, value in asdict(parameter).items() if value not in _INFINITE}
            | {"value": config[parameter.name]}
            for parameter in self.router.parameters
        ]

    @property
    def threshold(self) -> float:
        """The router's first parameter as it is in force for the server; NaN if it has none."""
        if self._control is not None and self._control.threshold is not None:
            return self._control.threshold
        value = self.router.context.config.get(self._names[0]) if self._names else None
        return math.nan if value is None else float(value)

    def configure(self, values: Mapping[str, float]) -> None:
        """Other values of the server's, from the next step on; a request's own still win."""
        context = self.router.context
        self.router.context = replace(context, config={**context.config, **values})

    def parameter_tensors(self, requests: Sequence[Request]) -> dict[str, torch.Tensor]:
        """float32 [B] by parameter name: the server's value, or the request's own."""
        config = self.router.context.config
        own = [(row, r.params.router) for row, r in enumerate(requests) if r.params.router]
        found: dict[str, torch.Tensor] = {}
        for name in self._names:
            values = np.full(len(requests), config[name], np.float32)
            for row, params in own:
                values[row] = params.get(name, config[name])
            found[name] = torch.from_numpy(values)
        return found

    def bounds(
        self, requests: Sequence[Request], params: Mapping[str, torch.Tensor] | None = None
    ) -> NDArray[np.float32] | None:
        """float32 [B]: what the scores of a ``capturable`` router are compared with in the step.

        None where the host must decide: the threshold is moved between score and decision, or the
        router fails, which it may do again when it is asked for the destinations.

        Args:
            params: those of ``parameter_tensors``, where somebody has them.
        """
        if self._control is not None:
            return None
        try:
            if params is None:
                params = self.parameter_tensors(requests)
            elif self.may_write:
                params = own_params(params)
            found: NDArray[np.float32] = self.router.bounds(params, requests).numpy()
            if found.shape != (len(requests),):
                raise ValueError(f"bounds returned {found.shape} for {len(requests)} rows")
            return found
        except Exception as error:
            self._of_batches.warning(
                monotonic(),
                "router raised %r for the bounds of a batch; asking it after the step",
                error,
            )
            return None

    def destinations(self, result: StepResult) -> Sequence[int | None]:
        """Where each row goes: 0 to P, or None where the router failed for that row alone."""
        if self._control is None:
            return self._ask_guarded(result)
        self._control.adjust(result, self.scores)
        found = self._ask_guarded(result)
        self._control.note(result, found)
        return found

    def _ask_guarded(self, result: StepResult) -> Sequence[int | None]:
        try:
            return self._ask(result)
        except Exception as error:
            self.on_failure("route")
            text = "router raised %r for a batch; asking row by row"
            self._of_batches.warning(monotonic(), text, error)
            return [self._ask_alone(result.row(row)) for row in range(len(result.requests))]

    def _ask(self, result: StepResult) -> list[int]:
        answer = self.router.route(result)
        if isinstance(answer, _ARRAYS):
            answer = answer.tolist()
        found = list(map(index, answer))
        if len(found) != len(result.requests):
            raise ValueError(f"route returned {len(found)} rows for {len(result.requests)}")
        if not self._valid.issuperset(found):
            wrong = next(number for number in found if number not in self._valid)
            raise ValueError(f"route returned {wrong!r}; 0 to {len(self._valid) - 1} are valid")
        return found

    def _ask_alone(self, result: StepResult) -> int | None:
        try:
            return self._ask(result)[0]
        except Exception:
            self.on_failure("route")
            self._say_failed("route", result.requests[0])
            return None

    def _say_failed(self, hook: str, request: RequestView) -> None:
        text = "router failed to %s request %d"
        self._of_requests.warning(monotonic(), text, hook, request.rid, trace=True)

    def scores(self, result: StepResult) -> list[float] | None:
        """What the router decided on, by row; None where it has no score or fails to say."""
        if not self._has_score:
            return None
        try:
            scores = self.router.score(result)
            if scores is None:
                return None
            found = [float(score) for score in scores.tolist()]
            if len(found) != len(result.requests):
                raise ValueError(f"score returned {len(found)} rows for {len(result.requests)}")
        except Exception:
            self.on_failure("score")
            text = "router failed to score a batch; its traces lack the scores"
            self._of_batches.warning(monotonic(), text, trace=True)
            return None
        return found

    def send(self, request: Request, token: int) -> tuple[bool, bytes] | None:
        """Whether ``token`` counts, and the router's bytes; None where the router failed."""
        if not self._calls_send:
            return self._says_by_default
        try:
            peer_req = self.router.send(request, token)
            extras = peer_req.extras
            if type(extras) is not bytes:
                extras = memoryview(extras).tobytes()
            if len(extras) > ROUTER_EXTRAS_BYTES:
                raise ValueError(f"{len(extras)} bytes of extras; 64 at most")
            return bool(peer_req.keep_token), extras
        except Exception:
            self.on_failure("send")
            self._say_failed("send", request)
            return None

    def receive(self, request: Request) -> bool:
        """Show an arriving request to the router; False where it failed."""
        if not self._calls_receive:
            return True
        try:
            self.router.receive(_arriving(request))
        except Exception:
            self.on_failure("receive")
            self._say_failed("receive", request)
            return False
        return True

    def admit(self, request: Request) -> int | None:
        """The model that writes first, or None where the router failed."""
        try:
            model = index(self.router.admit(request))
        except Exception:
            self.on_failure("admit")
            self._say_failed("admit", request)
            return None
        if model == self.router.model or model in self.router.peers:
            return model
        self.on_failure("admit")
        text = "router admitted request %d to model %d, which is none"
        self._of_requests.warning(monotonic(), text, request.rid, model)
        return None


def _arriving(request: Request) -> PeerReq:
    return PeerReq(
        rid=request.rid,
        token_ids=request.token_ids[request.num_computed :],
        loc=request.committed_len,
        keep_token=False,
        extras=request.extras,
    )
