"""The router under check with the models it is checked on, and runs of it in a workplace.

Knows how requests are asked; not what is expected of them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace as changed

from trserve.config import config_from_flags
from trserve.demo.grammar import held_out
from trserve.errors import ConfigError
from trserve.gateway.tokenizer import Tokenizer
from trserve.params import RequestParams, SamplingParams
from trserve.places import split_places
from trserve.plan import ServerPlan, make_plan
from trserve.router_check.watching import Notes, WatchedRouting
from trserve.router_check.workplace import (
    Answer,
    Asked,
    NoEndError,
    load_models,
    workplace,
)
from trserve.router_lib.base import BaseRouter, RouterContext
from trserve.workers.routing import Routing, create_router

SEED: Final = 1 << 40
"""Of the first request; the others' follow, so that a seed tells whose a note is."""
REQUESTS: Final = 8
_PROMPT_SEED: Final = 8086
_ROW_TOKENS: Final = 256
_OUTPUT: Final = (64, 40, 64, 24)


@dataclass(frozen=True)
class Run:
    """``answers`` by request, None where not all of them ended; ``stuck`` says which did not."""

    asked: Sequence[Asked]
    notes: Notes
    answers: Sequence[Answer] | None
    stuck: NoEndError | None = None


class Subject:
    """A router by name, and where it runs.

    Args:
        router: as ``--router``; modules are also looked for in the current folder.
        config: as ``--router-config``, by name.
        models: as ``--models``.

    Raises:
        StartupError: it cannot be made; the message says why.
    """

    def __init__(self, router: str, config: Mapping[str, Any], models: Sequence[str]) -> None:
        # As in a worker, which is started as a module.
        if (folder := str(Path.cwd())) not in sys.path:
            sys.path.insert(0, folder)
        pairs = tuple((name, str(value)) for name, value in config.items())
        flags = {"models": tuple(models), "router": router, "router_config": pairs}
        settings = config_from_flags(flags)
        for place in split_places(settings.model.models):
            if place.remote:
                raise ConfigError(
                    f"--models {place.name}@{place.remote}: a router is checked with models that "
                    "are here"
                )
        self.plan: ServerPlan = make_plan(settings)
        self.names = tuple(model.name for model in self.plan.models)
        self._models = load_models(self.plan)
        self._first = [self.router(index) for index in range(len(self.names))]
        self.parameters = self._first[0].parameters
        self.class_name = type(self._first[0]).__name__
        self.asks_admit = Routing(self._first[0]).asks_admit

    def router(self, index: int, server: Mapping[str, float] | None = None) -> BaseRouter:
        """A fresh router of the worker ``index``; ``server`` changes the configuration."""
        context = RouterContext(
            model=index,
            models=self.names,
            tokenizer_size=self.plan.tokenizer_size,
            config={**self.plan.router_config, **(server or {})},
            path=self.plan.models[index].path,
            embedding=self._models[index].decoder.embedding,
        )
        return create_router(self.plan.router, context)

    def requests(self) -> list[Asked]:
        """Greedy and sampled, long and short; the last one begins at the last model."""
        tokenizer = Tokenizer.load(Path(self.plan.tokenizer_path))
        return [
            self._request(index, _encoded(tokenizer, problem.question))
            for index, problem in enumerate(held_out(REQUESTS, _PROMPT_SEED))
        ]

    def _request(self, index: int, prompt: Sequence[int]) -> Asked:
        prompt = prompt[-_ROW_TOKENS // 2 :]
        sampling = SamplingParams(
            temperature=float(index % 2),
            seed=SEED + index,
            eos_token_ids=tuple(self.plan.eos_token_ids),
        )
        last = index == REQUESTS - 1
        return Asked(
            prompt,
            RequestParams(sampling=sampling, admit=not last),
            limit=len(prompt) + _OUTPUT[index % len(_OUTPUT)],
            entry=len(self.names) - 1 if last else 0,
        )

    def run(
        self,
        asked: Sequence[Asked],
        *,
        server: Mapping[str, float] | None = None,
        scored: bool = False,
        restarts: Sequence[int] = (),
    ) -> Run:
        """Ask all of ``asked`` together, of routers that are new.

        Args:
            server: changes to the router's configuration.
            scored: scores are asked for, as for requests with a trace.
            restarts: turns before which every router is replaced by a new one.
        """
        notes = Notes()
        routings = [
            WatchedRouting(self.router(index, server), notes, self.names, scored=scored)
            for index in range(len(self.names))
        ]

        def between(turn: int) -> None:
            if turn in restarts:
                for index, routing in enumerate(routings):
                    routing.router = self.router(index, server)

        with workplace(
            self.plan, self._models, routings, slots=len(asked), row_tokens=_ROW_TOKENS
        ) as place:
            try:
                return Run(asked, notes, place.run(asked, between))
            except NoEndError as error:
                return Run(asked, notes, None, error)


def seed_of(asked: Asked) -> int:
    """The seed, which tells requests apart."""
    return asked.params.sampling.seed


def with_router(asked: Asked, values: Mapping[str, float]) -> Asked:
    """The same request with router parameters of its own."""
    return replace(asked, params=changed(asked.params, router=dict(values)))


def with_stop(asked: Asked, token: int) -> Asked:
    """The same request, which ``token`` ends too."""
    sampling = changed(asked.params.sampling, stop_token_ids=(token,))
    return replace(asked, params=changed(asked.params, sampling=sampling))


def _encoded(tokenizer: Tokenizer, question: str) -> list[int]:
    if not tokenizer.has_chat_template:
        return tokenizer.encode(question, add_special_tokens=True)
    text = tokenizer.render_chat([{"role": "user", "content": question}])
    return tokenizer.encode(text, add_special_tokens=False)
