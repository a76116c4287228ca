"""``trserve.Engine``: the same worker processes, from Python and without HTTP.

An engine is the gateway of an instance of its own; what a request may ask for, and how its answer
comes about, is the same as over HTTP, by the same code. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from trserve.engine_settings import engine_config, engine_environment
from trserve.offline.answers import Completion, Part, TokenLogprob
from trserve.offline.call import Call
from trserve.offline.options import Params, Prompt, read_arguments
from trserve.offline.sampling_params import SamplingParams
from trserve.offline.session import EngineError, Session
from trserve.plan import make_plan
from trserve.router_lib.parameters import Parameter

__all__ = [
    "Completion",
    "Engine",
    "EngineError",
    "Part",
    "Prompt",
    "SamplingParams",
    "TokenLogprob",
]


class Engine:
    """Several models that write each answer together, behind two methods.

    Args:
        settings: what ``trserve launch`` takes, by field name: ``models=("tiny", "small")``,
            ``router="r-stitch"``, ``router_config={"tau": 0.03}``, ``dtype="float32"``, ...; a text
            is read as the flag's would be: ``models="tiny,small"``, ``memory="2g"``.
            ``record=DIR`` keeps what the models computed for every token that they sampled, with
            the ``record_top_k`` most probable tokens each; :mod:`trserve.records` reads it.

    Raises:
        StartupError: a setting is wrong, or a model cannot be loaded; the message says which.

    A context manager; ``close`` ends the workers. If the program ends without it, they end too.
    Safe to use from several threads at once. A recording that fails, because the disk is full
    say, stops with a message on standard error; the requests go on.
    """

    def __init__(self, **settings: Any) -> None:
        config = engine_config(settings)
        plan = make_plan(config)
        self.models = [model.name for model in plan.models]
        """Names of the models, in the order of their indices in ``sources``."""
        self._run = None if plan.record is None else plan.record.run
        self._defaults = plan.sampling_defaults
        self._session = Session(plan, engine_environment(config, settings))
        self._slots = plan.slots

    @property
    def router_parameters(self) -> tuple[Parameter, ...]:
        """The numbers that the router takes, as the entry worker has them; the first is the one
        that ``NAME:threshold=0.3`` sets."""
        return self._session.service.router_parameters

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params = None,
        **options: Any,
    ) -> Completion | list[Completion]:
        """Answer one prompt, or a list of them at once.

        Args:
            prompts: a text, token ids or chat messages; a list of such for several.
            params: how, for all prompts, or a list with one for each.
            options: fields of a request as over HTTP, which win over ``params``: ``max_tokens``,
                ``temperature``, ``seed``, ``stop``, ``n``, ``logprobs`` (with ``top_logprobs`` for
                a chat), ``echo``, ``trserve={"router": {"tau": 0.1}, "only": "small"}``, ...
                ``record=False`` keeps no record of this call.

        Returns:
            The answer, if there is one prompt that is no list and ``n`` is 1; else a list of
            ``n`` for each prompt, side by side, in the order of the prompts.

        Raises:
            RequestError: the request is wrong; ``param`` names what. Nothing of the call goes on.
            EngineError: the engine cannot go on.
        """
        with Call(self._session, self._run) as call:
            single = self._begin(call, prompts, params, options)
            answers = call.wholes()
        return answers[0] if single else answers

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params = None,
        **options: Any,
    ) -> Iterator[Part]:
        """The parts of answers as they are committed; each answer's last has a finish reason.

        Of several answers (``n``, or a list of prompts) the parts come as they are made;
        ``index`` says whose they are. Leaving the iterator ends what is not over. Arguments and
        errors as for :meth:`generate`; nothing happens before the first part is asked for.
        """
        with Call(self._session, self._run) as call:
            self._begin(call, prompts, params, options)
            yield from call.parts()

    def _begin(
        self,
        call: Call,
        prompts: Prompt | Sequence[Prompt],
        params: Params,
        options: Mapping[str, Any],
    ) -> bool:
        """Send all requests; True if one answer is expected."""
        self._session.check()
        requests = read_arguments(
            prompts, params, options, self._defaults, records=self._run is not None
        )
        if len(requests.each) > self._slots:
            # Some wait for others' ends: what is wrong with them is said before hours of work.
            for request in requests.each:
                call.check(request)
        for request in requests.each:
            call.begin(request)
        return requests.single and requests.each[0].n == 1

    def close(self) -> None:
        """End the workers; safe to call twice. Requests in flight fail."""
        self._session.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
