"""For tests of one's own router: the contract, its answers, and a plain loop to compare them with.

Everything here runs in this process, on the embedded pair unless other models are named. The loop
shares no code with the server: whole rows through transformers' models, one request at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

import torch
from msgspec.structs import replace as changed

from trserve.demo import model_path
from trserve.demo.grammar import held_out
from trserve.demo.modeling import load_checkpoint
from trserve.demo.tokenizer_build import EOS_ID, load_tokenizer, render_prompt
from trserve.router_check.checks import Check, check_router
from trserve.router_check.subject import Subject

__all__ = ["Check", "Written", "answer", "check_router", "plain_loop", "prompts"]

_PAIR: Final = ("tiny", "small")
_SEED: Final = 515

Rule = Callable[[int, torch.Tensor, int], tuple[int, bool]]
"""From (model, its logits [V] in float64, the token it chose) to (who writes next, whether the
token counts)."""


@dataclass(frozen=True)
class Written:
    """An answer: its tokens, and the index of the model that wrote each."""

    tokens: tuple[int, ...]
    sources: tuple[int, ...]


def prompts(count: int) -> list[list[int]]:
    """``count`` questions for the embedded pair as token ids, the same every time."""
    tokenizer = load_tokenizer(model_path("tiny"))
    texts = [render_prompt(problem) for problem in held_out(count, _SEED)]
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


def answer(
    router: str,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    config: Mapping[str, Any] | None = None,
) -> Written:
    """What the embedded pair writes after ``prompt`` under ``router``, greedily.

    Raises:
        StartupError: the router cannot be made.
    """
    subject = _subject(router, tuple((config or {}).items()))
    asked, *_ = subject.requests()
    asked = replace(asked, prompt=prompt, limit=len(prompt) + max_tokens)
    sampling = changed(asked.params.sampling, temperature=0.0)
    run = subject.run([replace(asked, params=changed(asked.params, sampling=sampling))])
    if run.answers is None:
        raise AssertionError(f"router {router}: {run.stuck}")
    if complaints := run.notes.complaints:
        raise AssertionError(f"router {router}: {complaints}")
    return Written(run.answers[0].tokens, run.answers[0].sources)


def plain_loop(rule: Rule, prompt: Sequence[int], *, max_tokens: int) -> Written:
    """What ``rule`` has the embedded pair write after ``prompt``, greedily, from model 0 on.

    Two steps in a row whose token does not count, at a model that nobody has just left, never end;
    a rule is expected not to ask for that. AssertionError where it does.
    """
    row, writer, fruitless = list(prompt), 0, 0
    sources: list[int] = []
    while len(sources) < max_tokens:
        logits = _logits(writer, row)
        token = int(logits.argmax())
        written_by = writer
        writer, counts = rule(writer, logits, token)
        fruitless = 0 if counts else fruitless + 1
        assert fruitless < len(_PAIR), "the rule discards every model's token"
        if counts:
            row.append(token)
            sources.append(written_by)
            if token == EOS_ID:
                break
    return Written(tuple(row[len(prompt) :]), tuple(sources))


@torch.inference_mode()
def _logits(model: int, row: Sequence[int]) -> torch.Tensor:
    size = load_tokenizer(model_path("tiny")).get_vocab_size()
    logits: torch.Tensor = _model(model)(input_ids=torch.tensor([row])).logits[0, -1, :size]
    return logits.double()


@lru_cache(maxsize=2)
def _model(index: int) -> Any:
    return load_checkpoint(model_path("tiny" if index == 0 else "small"))


@lru_cache(maxsize=4)
def _subject(router: str, config: tuple[tuple[str, Any], ...]) -> Subject:
    return Subject(router, dict(config), _PAIR)
