"""From a parsed request to a job: model names, tokens, limits and parameters, checked.

Everything that can be wrong with a request once its JSON is understood is found here, before a
slot is taken. Knows no HTTP and no event loop.
"""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from trserve.errors import RequestError
from trserve.gateway.answer import Answer
from trserve.gateway.detokenizer import Detokenizer
from trserve.gateway.dispatcher import Job
from trserve.gateway.generation import Generation, Sink
from trserve.gateway.grammar_requests import check_room, grammar_of
from trserve.gateway.logprobs import (
    ChatLogprobs,
    CompletionLogprobs,
    Logprobs,
    TokenNames,
)
from trserve.gateway.message_parts import PartSplitter, part_splitter
from trserve.gateway.metrics import Asked, Meter, Metrics
from trserve.gateway.model_links import links_of
from trserve.gateway.model_states import ModelStates
from trserve.gateway.placement import Placement, Placements
from trserve.gateway.prompts import Prompt, read_prompts
from trserve.gateway.random_bits import new_seed
from trserve.gateway.requests import GenerationRequest
from trserve.gateway.slots import Slot, pages_of
from trserve.gateway.stop_strings import StopMatcher
from trserve.gateway.tokenizer import Tokenizer
from trserve.ipc.annotations import AnnotationBook
from trserve.ipc.slab import Slab
from trserve.params import RequestParams, SamplingParams, encode_params
from trserve.plan import ServerPlan
from trserve.router_lib.parameters import Parameter, check_values

_UINT64_MASK: Final = 2**64 - 1
_SEED_AND_CHOICE: Final = struct.Struct("<QQ")
_THRESHOLD: Final = "threshold"


def choice_seed(seed: int, choice: int) -> int:
    """The 64-bit seed of the ``choice``-th answer to one prompt.

    The first has the request's own (a negative one in two's complement), so that ``n`` changes
    nothing about it; the others the first 8 bytes, little endian, of BLAKE2b over the seed and the
    choice's number, 8 bytes each, little endian.
    """
    seed &= _UINT64_MASK
    if choice == 0:
        return seed
    digest = hashlib.blake2b(_SEED_AND_CHOICE.pack(seed, choice), digest_size=8).digest()
    return int.from_bytes(digest, "little")


class Service:
    """What the endpoint offers; made once, from the plan.

    Attributes:
        plan: what the launcher said.
        tokenizer: that of all models.
        metrics: what is counted of requests.
        states: which models can write.
        placements: which of them a request is for.
        token_names: the texts of single tokens.
        keep_alive_s: longest silence of a stream; 0 for any.
        router_parameters: what the router takes; known once a worker has loaded it.
        router_values: the server's values of these at the start.
        max_prompt_and_output: the longest row that every model can hold.
    """

    def __init__(self, plan: ServerPlan, slab: Slab) -> None:
        self.plan = plan
        self._slab = slab
        template = plan.endpoint.chat_template
        self.tokenizer = Tokenizer.load(Path(plan.tokenizer_path), chat_template=template)
        self.token_names = TokenNames(self.tokenizer)
        self.model_names = [model.name for model in plan.models]
        self.states = ModelStates(self.model_names, links_of(plan, slab))
        self.placements = Placements(plan, self.states)
        self.metrics = Metrics(len(plan.models), *plan.endpoint.bucket_bounds)
        self.served_names = plan.served_names
        self.router_name = plan.router
        self.keep_alive_s = plan.endpoint.sse_keep_alive_s
        self.defaults = plan.sampling_defaults
        self.router_parameters: tuple[Parameter, ...] = ()
        self._eos_token_ids = tuple(plan.eos_token_ids)
        parser = plan.endpoint.reasoning_parser
        self._reasons = self.tokenizer.has_reasoning if parser == "auto" else parser != "none"
        self.router_values: dict[str, float | None] = {}
        self.max_prompt_and_output = min(model.max_model_len for model in plan.models)

    def set_router_parameters(self, described: list[dict[str, Any]]) -> None:
        """Take over what the entry worker's router says of its parameters."""
        self.router_parameters = tuple(msgspec.convert(described, list[Parameter]))
        self.router_values = {each["name"]: each.get("value") for each in described}

    def prepare_all(
        self, request: GenerationRequest, sink_of: Callable[[int, Prompt], Sink]
    ) -> list[Job]:
        """The jobs of ``request``, one a choice; their answers go to ``sink_of(index, prompt)``.

        The choices of a prompt stand side by side, in the order of the prompts. Raises
        RequestError.
        """
        asked = Asked(time.monotonic(), request.n, request.max_tokens)
        placement = self.placements.of(request)
        self.check_slots([request])
        router = self._router_params(request.router_params)
        self.metrics.threshold_overrides["request"] += bool(router)
        jobs: list[Job] = []
        context = self._context(placement)
        for prompt in read_prompts(request, self.tokenizer, self.plan.tokenizer_size, context):
            seed = new_seed() if request.seed is None else request.seed
            reasons = self._tells_reasoning(request)
            ends = self.plan.eos_token_ids
            grammar = grammar_of(request, prompt, self.tokenizer, ends, reasons=reasons)
            for choice in range(request.n):
                sink = sink_of(len(jobs), prompt)
                meter = Meter(self.metrics, len(prompt.ids), asked, counts_prompt=not choice)
                jobs.append(
                    self._job(
                        request, prompt, seed, choice, placement, router, sink, meter, grammar
                    )
                )
        self._check_pages(jobs)
        return jobs

    def prepare_many(
        self, requests: Sequence[GenerationRequest], sink_of: Callable[[int, Prompt], Sink]
    ) -> list[Job]:
        """:meth:`prepare_all` of requests that share a response, whose choices are numbered on."""
        if len(requests) == 1:
            return self.prepare_all(requests[0], sink_of)
        self.check_slots(requests)
        jobs: list[Job] = []
        for request in requests:
            jobs += self.prepare_all(request, _from(len(jobs), sink_of))
        self._check_pages(jobs)
        return jobs

    def _job(
        self,
        request: GenerationRequest,
        prompt: Prompt,
        seed: int,
        choice: int,
        placement: Placement,
        router: dict[str, float],
        sink: Sink,
        meter: Meter,
        grammar: bytes,
    ) -> Job:
        length = len(prompt.ids)
        limit = self._context(placement)
        if request.max_tokens is not None:
            limit = min(limit, length + request.max_tokens)
        params = RequestParams(
            sampling=self._sampling(request, choice_seed(seed, choice), limit - length),
            router=router,
            pinned=placement.pinned,
            admit=placement.admit,
            tops=self._tops(request),
            scores_prompt=request.echo and request.logprobs is not None,
            trace=request.trace,
            record=request.record,
            deadline_ns=meter.deadline_ns(request.timeout_s),
            grammar=grammar,
        )
        blob = encode_params(params)
        check_room(blob, grammar, request)
        return Job(
            prompt_ids=prompt.ids,
            params=blob,
            limit=limit,
            entry=placement.entry,
            fixed=not placement.admit,
            start=self._starter(request, prompt.ids, seed, params, placement, sink, meter),
            pages=pages_of(params, length, limit),
            deadline_ns=params.deadline_ns,
            visits=self._expecting(placement, request, limit - length),
        )

    def _tops(self, request: GenerationRequest) -> int | None:
        if request.logprobs is None:
            return None
        return min(request.logprobs, self.plan.tokenizer_size)

    def _check_pages(self, jobs: Sequence[Job]) -> None:
        """No more may be asked for than there is when nobody else is here."""
        layout, pages = self._slab.layout, [job.pages for job in jobs]
        if any(pages) and (max(pages) > layout.pages_per_request or sum(pages) > layout.num_pages):
            raise RequestError(
                "logprobs: their records for this many tokens do not fit in memory; lower "
                "max_tokens, the number of top logprobs, or n",
                param="logprobs",
            )

    def logprobs_of(self, request: GenerationRequest) -> Callable[[Prompt], Logprobs] | None:
        """What makes the collector of one choice's log probabilities, if they are wanted."""
        if request.logprobs is None:
            return None
        names = self.token_names
        if request.kind == "chat":
            return lambda _: ChatLogprobs(names)
        return lambda prompt: CompletionLogprobs(
            names,
            self._detokenizer(request, () if request.echo else prompt.ids),
            prompt.ids if request.echo else (),
        )

    def splitters_of(
        self, request: GenerationRequest
    ) -> Callable[[Prompt], PartSplitter | None] | None:
        """What tells the parts of an answer's message apart, if it may have any but content."""
        reasons = self._tells_reasoning(request)
        if not (request.tools or reasons):
            return None
        return lambda prompt: part_splitter(request, prompt.text, reasons=reasons)

    def _tells_reasoning(self, request: GenerationRequest) -> bool:
        return self._reasons and request.kind == "chat" and request.reasoning != "within"

    def _detokenizer(self, request: GenerationRequest, context: Sequence[int]) -> Detokenizer:
        return Detokenizer(self.tokenizer, context, skip_special_tokens=request.skip_special_tokens)

    def check_slots(self, requests: Iterable[GenerationRequest]) -> None:
        """All choices are taken at once, so there must be a slot for each; else RequestError."""
        wanted, slots = sum([request.num_choices for request in requests]), self.plan.slots
        if wanted > slots:
            raise RequestError(
                f"the request asks for {wanted} choices (n for each prompt); this server holds "
                f"{slots} at once: lower n or send fewer prompts",
                param="n",
            )

    def _expecting(self, placement: Placement, request: GenerationRequest, room: int) -> list[int]:
        """The models that may compute the prompt early; none if it is scored, or all there is."""
        scored = request.echo and request.logprobs is not None
        if self.plan.early_prefill == "off" or scored or room < 1:
            return []
        lost = self.states.lost
        return [model for model in self.placements.visits(placement) if model not in lost]

    def _router_params(self, given: dict[str, float]) -> dict[str, float]:
        if not given:
            return given
        parameters = [p for p in self.router_parameters if p.per_request]
        values = dict(given)
        names = [parameter.name for parameter in parameters]
        # "threshold" is everybody's name for a router's first parameter.
        if _THRESHOLD in values and _THRESHOLD not in names and names:
            values.setdefault(names[0], values[_THRESHOLD])
            del values[_THRESHOLD]
        if problem := check_values(values, self.plan.router, parameters):
            raise RequestError(problem, param="trserve.router")
        return values

    def _context(self, placement: Placement) -> int:
        """The longest that a row may get: what every model that it may visit can hold."""
        if placement.pinned:
            return self.plan.models[placement.entry].max_model_len
        return self.max_prompt_and_output

    def _sampling(self, request: GenerationRequest, seed: int, max_tokens: int) -> SamplingParams:
        self._check_known("stop_token_ids", request.stop_token_ids)
        self._check_known("logit_bias", request.logit_bias)
        return SamplingParams(
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            min_p=request.min_p,
            seed=seed,
            max_tokens=max_tokens,
            min_tokens=min(request.min_tokens, max_tokens),
            ignore_eos=request.ignore_eos,
            stop_token_ids=tuple(request.stop_token_ids),
            eos_token_ids=self._eos_token_ids,
            repetition_penalty=request.repetition_penalty,
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            logit_bias=request.logit_bias,
        )

    def _check_known(self, param: str, ids: Collection[int]) -> None:
        size = self.plan.tokenizer_size
        if ids and any(not 0 <= token < size for token in ids):
            raise RequestError(f"{param}: ids are 0 to {size - 1}", param=param)

    def _starter(
        self,
        request: GenerationRequest,
        prompt_ids: Sequence[int],
        seed: int,
        params: RequestParams,
        placement: Placement,
        sink: Sink,
        meter: Meter,
    ) -> Callable[[Slot], Generation]:
        answer = Answer(
            self._detokenizer(request, prompt_ids),
            StopMatcher(request.stop, include_in_output=request.include_stop_str_in_output),
            request.stop_token_ids,
            len(self.model_names),
            min_tokens=params.sampling.min_tokens,
            shows_end=request.include_stop_str_in_output,
        )

        def start(slot: Slot) -> Generation:
            meter.admit()
            book = None
            if params.annotated:
                first = params.first_record(len(prompt_ids))
                book = AnnotationBook(self._slab, slot.index, first=first, tops=params.tops or 0)
            return Generation(
                slab=self._slab,
                slot=slot,
                prompt_tokens=len(prompt_ids),
                seed=seed,
                answer=answer,
                sink=sink,
                model_names=self.model_names,
                book=book,
                scores_prompt=params.scores_prompt,
                degraded=self.states.watch(self.placements.visits(placement)),
                links=self.states.links,
                meter=meter,
            )

        return start


def _from(first: int, sink_of: Callable[[int, Prompt], Sink]) -> Callable[[int, Prompt], Sink]:
    """``sink_of`` with indices that count from ``first``."""
    return lambda index, prompt: sink_of(first + index, prompt)
