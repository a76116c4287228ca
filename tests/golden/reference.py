"""The reference: R-Stitch as one plain loop over two transformers models, one request at a time.

It decides what the right answer is, so it shares no code with trserve and knows nothing of
servers, batches, slabs or handoffs: a row of tokens, two models, and who writes next. Beside each
decision it records how close it was to a different one; ``compare.py`` needs that.

A discarded token was drawn but never fed to a model, so the caches only ever hold committed
tokens and nothing is rolled back. Everything after the float32 forward pass is in float64.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, DynamicCache

from tests.golden.philox import uniform

GREEDY_BELOW = 1e-5
SLM, LLM = 0, 1


@dataclass(frozen=True)
class Setting:
    """How one request is decoded; ``only`` names the one model that writes, ``tau`` is unused then.

    ``temperature`` 0 is greedy. ``entry`` is the model that writes first. ``logit_bias`` holds
    pairs of a token and what is added to its logit.
    """

    tau: float = 0.0
    only: int | None = None
    entry: int = SLM
    max_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


@dataclass(frozen=True)
class Step:
    """One forward pass and what was decided on it.

    ``position`` counts output tokens from 0; ``choice_margin`` is the gap between the two largest
    logits (greedy) or the distance of u from the nearest boundary of the cumulative distribution,
    or of a probability from a filter's if that is nearer (sampling); ``router_margin`` is
    |H - tau|, infinite where no router decides.
    """

    position: int
    model: int
    token: int
    kept: bool
    entropy: float
    choice_margin: float
    router_margin: float


@dataclass
class Trace:
    """A finished reference run: the tokens, who wrote each, and all steps, discarded ones too."""

    prompt: tuple[int, ...]
    setting: Setting
    tokens: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    finish_reason: str = ""
    handoffs: int = 0


class Model:
    """A checkpoint in float32 with the size of its tokenizer and its end-of-sequence ids."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.net = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.net.train(False)
        self.tokenizer = Tokenizer.from_file(str(_beside(path, "tokenizer.json")))
        self.size = self.tokenizer.get_vocab_size(with_added_tokens=True)
        self.eos = eos_ids(path, self.tokenizer)

    def session(self) -> Session:
        """An empty cache of this model for one request."""
        return Session(self)


class Session:
    """What one model has seen of one request."""

    # The keyword was renamed within transformers 5; both spellings take the same object.
    def __init__(self, model: Model) -> None:
        self.model = model
        self.cache = DynamicCache()
        self.seen = 0
        parameters = inspect.signature(model.net.forward).parameters
        self.keyword = "cache" if "cache" in parameters else "past_key_values"

    @torch.inference_mode()
    def logits(self, row: Sequence[int]) -> torch.Tensor:
        """Raw logits [V] in float64 after ``row``, which may only have grown since the last call.

        Rows of the head beyond the tokenizer are at -inf.
        """
        unseen = torch.tensor([row[self.seen :]])
        arguments: dict[str, Any] = {self.keyword: self.cache, "use_cache": True}
        output = self.model.net(input_ids=unseen, logits_to_keep=1, **arguments)
        self.seen = len(row)
        return masked(output.logits[0, -1], self.model.size)


class Reference:
    """R-Stitch over (SLM, LLM), with every run kept: the same request is decoded once."""

    def __init__(self, slm: Path, llm: Path) -> None:
        self.models = (Model(slm), Model(llm))
        self.eos = self.models[SLM].eos | self.models[LLM].eos
        self._runs: dict[tuple[tuple[int, ...], Setting], Trace] = {}

    def run(self, prompt: Sequence[int], setting: Setting) -> Trace:
        """The trace of ``prompt`` under ``setting``."""
        key = (tuple(prompt), setting)
        if key not in self._runs:
            self._runs[key] = self._decode(*key)
        return self._runs[key]

    def _decode(self, prompt: tuple[int, ...], setting: Setting) -> Trace:
        trace = Trace(prompt, setting)
        row = list(prompt)
        sessions = [model.session() for model in self.models]
        writer = setting.entry if setting.only is None else setting.only
        while True:
            step, routed = self._step(sessions[writer].logits(row), row, writer, trace)
            trace.steps.append(step)
            if step.kept:
                row.append(step.token)
                trace.tokens.append(step.token)
                trace.sources.append(writer)
                trace.finish_reason = self._finish(step.token, trace)
                if trace.finish_reason:
                    return trace
            if routed:
                writer = 1 - writer
                trace.handoffs += 1

    def _step(
        self, logits: torch.Tensor, row: Sequence[int], writer: int, trace: Trace
    ) -> tuple[Step, bool]:
        setting = trace.setting
        wanted = self._wanted(logits, row, trace)
        if setting.greedy:
            token, choice_margin = arg_max(wanted)
        else:
            u = uniform(setting.seed, len(row), writer)
            kept_logits, filter_margin = filtered(wanted / setting.temperature, setting)
            token, choice_margin = inverse_cdf(kept_logits, 1.0, u)
            choice_margin = min(choice_margin, filter_margin)
        entropy = normalised_entropy(logits, self.models[writer].size)
        routed, router_margin = False, math.inf
        if setting.only is None:
            uncertain = entropy > setting.tau
            routed = uncertain if writer == SLM else not uncertain
            router_margin = abs(entropy - setting.tau)
        kept = writer == LLM or not routed
        position = len(trace.tokens)
        step = Step(position, writer, token, kept, entropy, choice_margin, router_margin)
        return step, routed

    def _wanted(self, logits: torch.Tensor, row: Sequence[int], trace: Trace) -> torch.Tensor:
        """``logits`` as the request wants them before a token is chosen."""
        return penalised(logits, row, len(trace.prompt), trace.setting)

    def _finish(self, token: int, trace: Trace) -> str:
        if token in self.eos:
            return "stop"
        return "length" if len(trace.tokens) == trace.setting.max_tokens else ""


def masked(logits: torch.Tensor, size: int) -> torch.Tensor:
    """``logits`` [V] in float64 with columns from ``size`` on at -inf."""
    masked = logits.double().clone()
    masked[size:] = -math.inf
    return masked


def normalised_entropy(logits: torch.Tensor, size: int) -> float:
    """H(softmax(logits)) / ln(size), from 0 (certain) to 1 (uniform over the tokenizer)."""
    return float(torch.special.entr(torch.softmax(logits, dim=-1)).sum()) / math.log(size)


def arg_max(logits: torch.Tensor) -> tuple[int, float]:
    """The token of the largest logit (the lowest index of equal ones) and its lead."""
    first, second = torch.topk(logits, 2).values.tolist()
    token = int((logits == first).nonzero()[0])
    return token, first - second


def penalised(
    logits: torch.Tensor, row: Sequence[int], prompt_length: int, setting: Setting
) -> torch.Tensor:
    """``logits`` after biases, the repetition penalty (of all of ``row``), the frequency and the
    presence penalty (of the output alone)."""
    logits = logits.clone()
    for token, bias in setting.logit_bias:
        logits[token] += bias
    output = row[prompt_length:]
    for token in set(row):
        if logits[token] > 0:
            logits[token] /= setting.repetition_penalty
        else:
            logits[token] *= setting.repetition_penalty
    for token in set(output):
        logits[token] -= setting.frequency_penalty * output.count(token)
        logits[token] -= setting.presence_penalty
    return logits


def filtered(logits: torch.Tensor, setting: Setting) -> tuple[torch.Tensor, float]:
    """``logits`` with -inf where top_k, then top_p, then min_p remove a token, and the margin.

    The margin is the least distance of a probability (for top_p: of a sum of them) from the
    boundary that decides whether its token stays.
    """
    margin = math.inf
    if setting.top_k:
        ordered = torch.softmax(logits, dim=-1).sort(descending=True).values
        margin = float(ordered[setting.top_k - 1] - ordered[setting.top_k])
        logits = _only(logits, torch.softmax(logits, dim=-1) >= ordered[setting.top_k - 1])
    if setting.top_p < 1.0:
        ordered, order = torch.softmax(logits, dim=-1).sort(descending=True)
        before = ordered.cumsum(-1) - ordered
        inside = torch.zeros_like(logits, dtype=torch.bool)
        inside[order] = before < setting.top_p
        # Behind the last token nothing is left to keep or remove.
        decided = before[ordered > 0]
        margin = min(margin, float((decided - setting.top_p).abs().min()))
        logits = _only(logits, inside)
    if setting.min_p:
        probabilities = torch.softmax(logits, dim=-1)
        distances = probabilities - setting.min_p * probabilities.max()
        margin = min(margin, float(distances[probabilities > 0].abs().min()))
        logits = _only(logits, distances >= 0)
    return logits, margin


def _only(logits: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    return logits.masked_fill(~kept, -math.inf)


def inverse_cdf(logits: torch.Tensor, temperature: float, u: float) -> tuple[int, float]:
    """The token whose interval of the cumulative distribution holds ``u``, and how safely it does.

    The safety is the distance of u to the nearer end of the interval, as a probability; an end
    with no probability beyond it leads to no other choice and does not count.
    """
    cumulative = torch.cumsum(torch.softmax(logits / temperature, dim=-1), dim=-1)
    total = float(cumulative[-1])
    token = int((cumulative > u * total).nonzero()[0])
    below = float(cumulative[token - 1]) if token else 0.0
    above = float(cumulative[token])
    margins = [math.inf]
    if below > 0.0:
        margins.append(u - below / total)
    if above < total:
        margins.append(above / total - u)
    return token, min(margins)


def eos_ids(path: Path, tokenizer: Tokenizer) -> frozenset[int]:
    """All end-of-sequence ids that the checkpoint states, wherever it states them."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        if (path / name).exists():
            stated = json.loads((path / name).read_text()).get("eos_token_id")
            found.update([stated] if isinstance(stated, int) else stated or [])
    settings = json.loads(_beside(path, "tokenizer_config.json").read_text())
    token = settings.get("eos_token")
    token = token["content"] if isinstance(token, dict) else token
    if token is not None and (end := tokenizer.token_to_id(token)) is not None:
        found.add(end)
    return frozenset(found)


def _beside(path: Path, name: str) -> Path:
    """A file of the checkpoint; a pair may keep its common tokenizer one level up."""
    return path / name if (path / name).exists() else path.parent / name
