"""``trserve.Engine``: the same worker processes, from Python and without HTTP.

An engine is the gateway of an instance of its own: it fills slots, reads rows and detokenizes,
in a thread with an event loop; ``trserve.host`` supervises the workers in a process beside it.
Imports no torch.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, TypeGuard, TypeVar, cast

import orjson

from trserve.config import LaunchConfig, config_from_flags
from trserve.embedded import STOP_TIMEOUT_S, HostProcess, startup_error
from trserve.errors import RequestError, TrserveError
from trserve.gateway.answer import Delta
from trserve.gateway.dispatcher import Dispatcher
from trserve.gateway.generation import Generation
from trserve.gateway.request_body import ChatBody, CompletionBody
from trserve.gateway.requests import GenerationRequest, parse_chat, parse_completion
from trserve.gateway.service import Service
from trserve.gateway.slots import SlotTable
from trserve.ipc.control import GATEWAY_IDENTITY, ControlClient, Message
from trserve.ipc.publish import Outbox
from trserve.ipc.rings import RingProducer
from trserve.ipc.slab import Slab
from trserve.params import SamplingDefaults
from trserve.plan import make_plan

START_TIMEOUT_S: Final = 600.0

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text, token ids that are used as they are, or chat messages."""

T = TypeVar("T")


class EngineError(TrserveError):
    """The engine cannot go on: a worker ended, or it was closed."""


@dataclass(frozen=True)
class Completion:
    """A whole answer.

    ``token_ids`` and ``sources`` (the index of the model that wrote each) have the same length;
    ``usage`` is what the HTTP response calls usage.
    """

    text: str
    token_ids: list[int]
    sources: list[int]
    finish_reason: str
    stop_reason: str | int | None
    usage: dict[str, Any]


class _Collector:
    """A sink that hands every delta to a thread that waits; never too slow."""

    def __init__(self) -> None:
        self.deltas: queue.SimpleQueue[Delta | RequestError] = queue.SimpleQueue()
        self.usage: Callable[[], dict[str, Any]] = dict

    @property
    def paused(self) -> bool:
        """Never: the queue is unbounded, the row that it mirrors is not."""
        return False

    def take(self, delta: Delta) -> None:
        self.deltas.put(delta)

    def fail(self, error: RequestError) -> None:
        self.deltas.put(error)


class Engine:
    """Several models that write each answer together, behind two methods.

    Args:
        settings: what ``trserve launch`` takes, by field name: ``models=("tiny", "small")``,
            ``router="r-stitch"``, ``router_config={"tau": 0.03}``, ``dtype="float32"``, ...

    Raises:
        StartupError: a setting is wrong, or a model cannot be loaded; the message says which.

    A context manager; ``close`` ends the workers. If the program ends without it, they end too.
    """

    def __init__(self, **settings: Any) -> None:
        self._plan = make_plan(_config(settings))
        self._host = HostProcess(self._plan)
        self._failure: BaseException | None = None
        self._generations: dict[int, Generation] = {}
        self._stop: Callable[[], None] | None = None
        started: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(started,), name="trserve-engine", daemon=True
        )
        self._thread.start()
        try:
            started.result(START_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    @property
    def models(self) -> list[str]:
        """Names of the models, in the order of their indices in ``sources``."""
        return [model.name for model in self._plan.models]

    # -- generating --------------------------------------------------------------------------

    def generate(
        self, prompts: Prompt | Sequence[Prompt], **options: Any
    ) -> Completion | list[Completion]:
        """Answer one prompt, or a list of them at once.

        Args:
            prompts: a text, token ids or chat messages; a list of such for several.
            options: fields of a request as over HTTP: ``max_tokens``, ``temperature``, ``seed``,
                ``stop``, ..., ``trserve={"router": {"tau": 0.1}, "only": "small"}``.

        Raises:
            RequestError: the request is wrong; ``param`` names what.
            EngineError: the engine cannot go on.
        """
        if _is_many(prompts):
            begun = [self._begin(prompt, options) for prompt in prompts]
            return [self._collect(sink) for sink in begun]
        return self._collect(self._begin(cast(Prompt, prompts), options))

    def stream(self, prompt: Prompt, **options: Any) -> Iterator[Delta]:
        """The parts of one answer as they are committed; the last has a finish reason.

        Leaving the iterator ends the request. Arguments and errors as for :meth:`generate`.
        """
        sink = self._begin(prompt, options)
        last: Delta | None = None
        try:
            while last is None or last.finish_reason is None:
                last = self._next(sink)
                yield last
        finally:
            if last is None or last.finish_reason is None:
                self._call(self._abandon, sink)

    def _begin(self, prompt: Prompt, options: Mapping[str, Any]) -> _Collector:
        request = _request(prompt, options, self._plan.sampling_defaults)
        sink = _Collector()
        self._submit(self._start(request, sink)).result()
        return sink

    async def _start(self, request: GenerationRequest, sink: _Collector) -> None:
        job = self._service.prepare(request, sink)
        self._generations[id(sink)] = await self._dispatcher.submit(job)

    def _next(self, sink: _Collector) -> Delta:
        found = sink.deltas.get()
        if isinstance(found, RequestError):
            raise EngineError(found.message) if found.code == "worker_lost" else found
        return found

    def _collect(self, sink: _Collector) -> Completion:
        texts: list[str] = []
        token_ids: list[int] = []
        sources: list[int] = []
        while True:
            delta = self._next(sink)
            texts.append(delta.text)
            token_ids += delta.token_ids
            sources += delta.sources
            if delta.finish_reason is not None:
                break
        self._call(self._generations.pop, id(sink), None)
        return Completion(
            "".join(texts), token_ids, sources, delta.finish_reason, delta.stop_reason, sink.usage()
        )

    def _abandon(self, sink: _Collector) -> None:
        generation = self._generations.pop(id(sink), None)
        if generation is not None and not generation.ended:
            self._dispatcher.cancel(generation)

    # -- the thread --------------------------------------------------------------------------

    def _submit(self, coroutine: Any) -> Future[Any]:
        if self._failure is not None or not self._thread.is_alive():
            coroutine.close()
            raise EngineError(str(self._failure or "the engine is closed"))
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _call(self, function: Callable[..., T], *arguments: Any) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(function, *arguments)

    def _run(self, started: Future[None]) -> None:
        try:
            with asyncio.Runner() as runner:
                runner.run(self._serve(started))
        except Exception as error:
            self._failure = error
            if not started.done():
                started.set_exception(error)

    async def _serve(self, started: Future[None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopped = asyncio.Event()
        self._started = started
        shared = self._host.shared
        assert shared is not None, "closed before it was started"
        slab = Slab(shared.slab_fd, self._plan.layout)
        gateway = self._plan.layout.gateway
        rings = {
            worker: RingProducer(slab.ring_words(gateway, worker))
            for worker in range(len(self._plan.models))
        }
        bells = shared.bells
        self._dispatcher = Dispatcher(slab, SlotTable(slab, Outbox(slab, rings, bells)), bells[-1])
        self._service = Service(self._plan, slab)
        self._control = ControlClient(self._host.control_endpoint, GATEWAY_IDENTITY)
        self._loop.add_reader(bells[-1], self._dispatcher.on_bell)
        self._loop.add_reader(self._control.fd, self._on_control)
        self._loop.add_reader(self._host.output_fd, self._on_host_output)
        self._control.send({"type": "ready"})
        self._on_control()
        closed = EngineError("the engine is closed")
        self._stop = lambda: self._call(self._fail, closed)
        await self._stopped.wait()
        self._control.send({"type": "quit"})
        self._control.close(linger_ms=1000)

    def _on_control(self) -> None:
        while messages := self._control.receive_all():
            for message in messages:
                self._on_message(message)

    def _on_message(self, message: Message) -> None:
        if message["type"] == "serve":
            self._service.set_router_parameters(message["router_parameters"])
            self._control.send({"type": "serving"})
            if not self._started.done():
                self._started.set_result(None)
        elif message["type"] == "lost":
            self._fail(EngineError(message["message"]))

    def _on_host_output(self) -> None:
        """The supervisor's last line, or its end without one."""
        line = self._host.read_line()
        self._loop.remove_reader(self._host.output_fd)
        if not line:
            self._fail(EngineError("the engine's supervisor ended"))
            return
        self._fail(startup_error(line["failed"], line["exit_code"]))

    def _fail(self, error: TrserveError) -> None:
        self._failure = self._failure or error
        lost = RequestError(str(self._failure), status=503, code="worker_lost")
        self._dispatcher.fail_all(lost)
        if not self._started.done():
            self._started.set_exception(error)
        self._stopped.set()

    # -- the end -----------------------------------------------------------------------------

    def close(self) -> None:
        """End the workers; safe to call twice. Requests in flight fail."""
        if self._stop is not None:
            self._stop()
        self._thread.join(STOP_TIMEOUT_S)
        self._host.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _config(settings: Mapping[str, Any]) -> LaunchConfig:
    values = dict(settings)
    if isinstance(values.get("models"), str):
        values["models"] = (values["models"],)
    router_config = values.get("router_config")
    if isinstance(router_config, Mapping):
        values["router_config"] = tuple((key, str(value)) for key, value in router_config.items())
    return config_from_flags(values)


def _is_many(prompts: Prompt | Sequence[Prompt]) -> TypeGuard[Sequence[Prompt]]:
    if isinstance(prompts, str):
        return False
    return not prompts or not isinstance(prompts[0], int | Mapping)


def _request(
    prompt: Prompt, options: Mapping[str, Any], defaults: SamplingDefaults
) -> GenerationRequest:
    """The request as HTTP would have it, so that both are checked by the same code."""
    is_chat = not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
    body_type = ChatBody if is_chat else CompletionBody
    unknown = [name for name in options if name not in body_type.__struct_fields__]
    if unknown:
        raise RequestError(f"unknown option {unknown[0]!r}", param=unknown[0])
    body = orjson.dumps({"messages" if is_chat else "prompt": prompt, **options})
    return parse_chat(body, defaults) if is_chat else parse_completion(body, defaults)
