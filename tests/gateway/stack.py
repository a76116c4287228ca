"""A gateway without processes: its parts over a slab whose workers are fakes, and small plans."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.gateway.small_tokenizers import CHATML, byte_level, save
from tests.workers.fakes import EOS, World
from trserve.errors import RequestError
from trserve.gateway.answer import Answer, Delta
from trserve.gateway.dispatcher import Dispatcher, Job
from trserve.gateway.generation import Generation
from trserve.gateway.requests import GenerationRequest
from trserve.gateway.slots import Slot, pages_of
from trserve.gateway.stop_strings import StopMatcher
from trserve.ipc.annotations import AnnotationBook
from trserve.params import RequestParams, SamplingParams, encode_params
from trserve.plan import ModelPlan, ServerPlan


class Letters:
    """A detokenizer of 64 letters: no special tokens, nothing held back."""

    def push(self, token: int) -> str:
        return chr(64 + token)

    def flush(self) -> str:
        return ""


def letters(text: str) -> list[int]:
    """The tokens of ``text``."""
    return [ord(letter) - 64 for letter in text]


class ListSink:
    """Keeps all that it is given."""

    def __init__(self) -> None:
        self.usage: Any = None
        self.paused = False
        self.plain = None
        self.deltas: list[Delta] = []
        self.error: RequestError | None = None
        self.breaks = False

    def take(self, delta: Delta) -> None:
        if self.breaks:
            raise ZeroDivisionError("a bug")
        self.deltas.append(delta)

    def fail(self, error: RequestError) -> None:
        self.error = error

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def ids(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.token_ids]

    @property
    def finish_reason(self) -> str | None:
        return self.deltas[-1].finish_reason if self.deltas else None


def new_answer(
    models: int = 2,
    stops: tuple[str, ...] = (),
    ids: tuple[int, ...] = (),
    *,
    least: int = 0,
    shows_end: bool = False,
) -> Answer:
    return Answer(
        Letters(),  # type: ignore[arg-type]
        StopMatcher(stops, include_in_output=shows_end),
        ids,
        models,
        min_tokens=least,
        shows_end=shows_end,
    )


def new_job(
    w: World,
    sink: Any,
    *,
    prompt: tuple[int, ...] = (1, 2, 3),
    limit: int = 12,
    stops: tuple[str, ...] = (),
    params: bytes | None = None,
    pages: int = 0,
    tops: int | None = None,
) -> Job:
    """A greedy request that no router sees; with ``tops`` its prompt is scored."""
    sampling = SamplingParams(temperature=0.0, eos_token_ids=(EOS,))
    scored = RequestParams(sampling=sampling, tops=tops, scores_prompt=tops is not None)
    first = scored.first_record(len(prompt))

    def start(slot: Slot) -> Generation:
        book = None
        if tops is not None:
            book = AnnotationBook(w.slab, slot.index, first=first, tops=tops)
        return Generation(
            slab=w.slab,
            slot=slot,
            prompt_tokens=len(prompt),
            seed=0,
            answer=new_answer(len(w.workers), stops),
            sink=sink,
            model_names=[f"m{n}" for n in range(len(w.workers))],
            book=book,
            scores_prompt=tops is not None,
        )

    return Job(
        prompt_ids=prompt,
        params=encode_params(scored) if params is None else params,
        limit=limit,
        entry=0,
        start=start,
        pages=pages or pages_of(scored, len(prompt), limit),
    )


def new_dispatcher(w: World, **settings: Any) -> Dispatcher:
    return Dispatcher(w.slab, w.slots, w.memory.bells[-1], **settings)


def new_plan(path: Path, *, lengths: tuple[int, ...] = (64, 64), **changes: Any) -> ServerPlan:
    """A plan over a byte-level tokenizer, which is written to ``path``."""
    tokenizer = byte_level()
    save(tokenizer, path, {"chat_template": CHATML})
    settings: dict[str, Any] = {
        "models": [
            ModelPlan(
                name=f"m{n}",
                path=str(path),
                dtype="float32",
                max_model_len=length,
                num_blocks=64,
                threads=1,
            )
            for n, length in enumerate(lengths)
        ],
        "device": "cpu",
        "router": "r-stitch",
        "router_config": {"tau": 0.03},
        "tokenizer_path": str(path),
        "tokenizer_size": tokenizer.get_vocab_size(),
        "eos_token_ids": [EOS],
        "served_names": ["trserve", "other"],
        "slots": 4,
        "row_tokens": max(lengths),
        "block_size": 4,
        "max_rows": 8,
        "max_tokens": 64,
    }
    return ServerPlan(**{**settings, **changes})


def completion(**fields: Any) -> GenerationRequest:
    return GenerationRequest(kind="completion", **{"prompts": [[1, 2, 3]], **fields})
