"""Runners for checks: real shapes with dummy weights, or the embedded pair's small ones.

Knows how a runner is put together; nothing of what is checked.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import torch

from trserve.models.aliases import LoadFormat, resolve_model
from trserve.models.cuda.weights import load_onto
from trserve.models.decoder import Decoder
from trserve.models.spec import read_spec
from trserve.router_lib.base import BaseRouter, RouterContext
from trserve.router_lib.uncertainty import Entropy
from trserve.workers.cuda.buckets import RunnerLimits
from trserve.workers.cuda.create import assemble_runner, attention_from_environment
from trserve.workers.cuda.runner import CudaRunner
from trserve.workers.in_step import StepAsk
from trserve.workers.row_sampling import greedy
from trserve.workers.runner import ForwardOutput
from trserve.workers.step import StepInputs

BLOCK: Final = 16
ROW_TOKENS: Final = 2048
MAX_TOKENS: Final = 2048
PIECES: Final = frozenset({"slm", "extend", "router"})


def decoder_of(
    name: str, device: torch.device, dtype: torch.dtype, *, dummy: bool, layers: int = 0
) -> Decoder:
    """The decoder of an alias; only its first ``layers``, where that is not 0."""
    load_format: LoadFormat = "dummy" if dummy else "auto"
    model = resolve_model(name, load_format)
    spec = read_spec(model.path)
    if layers:
        spec = replace(spec, num_layers=layers)
    return load_onto(device, model.path, spec, dtype=dtype, load_format=load_format)


def runner_of(
    decoder: Decoder,
    rows: int,
    pieces: frozenset[str] = PIECES,
    *,
    model: int = 0,
    attention: str = "",
    tokenizer_size: int = 0,
) -> CudaRunner:
    """A runner with KV for ``rows`` rows, and a router that decides on entropies.

    ``attention`` is what a server would take where it is not given, and ``tokenizer_size`` the
    whole vocabulary where it is 0.
    """
    vocabulary = tokenizer_size or decoder.spec.vocab_size
    runner = assemble_runner(
        decoder,
        num_blocks=rows * ROW_TOKENS // BLOCK,
        block_size=BLOCK,
        limits=RunnerLimits(rows, MAX_TOKENS, pieces),
        row_tokens=ROW_TOKENS,
        model=model,
        tokenizer_size=vocabulary,
        attention=attention or attention_from_environment(),
    )
    runner.prepare(router_of(vocabulary))
    return runner


def router_of(vocabulary: int) -> BaseRouter:
    """Entropy, with its defaults."""
    config = {parameter.name: parameter.default for parameter in Entropy.parameters}
    return Entropy(RouterContext(0, ("small", "large"), vocabulary, config))


class Rows:
    """Rows of random prompts, each in blocks of its own, and the steps that compute them.

    Attributes:
        length: tokens of each row so far; ``tokens`` are the rows.
    """

    def __init__(self, count: int, vocabulary: int, seed: int, prompt: Sequence[int]) -> None:
        rng = np.random.default_rng(seed)
        blocks = ROW_TOKENS // BLOCK
        self.step = StepInputs(
            max_tokens=MAX_TOKENS, max_rows=count, max_blocks_per_row=blocks, block_size=BLOCK
        )
        self.tables = np.arange(count * blocks, dtype=np.int32).reshape(count, blocks)
        self.tokens = [rng.integers(0, vocabulary, length).tolist() for length in prompt]
        self.computed = [0] * count

    def prefill(self, runner: CudaRunner) -> None:
        """Compute all tokens but the last of each row, a row at a time."""
        for row, tokens in enumerate(self.tokens):
            self.step.clear()
            self.step.add_row(np.array(tokens[:-1], np.int64), 0, self.tables[row])
            self.computed[row] = len(tokens) - 1
            runner.forward(self.step)

    def next_step(self) -> StepInputs:
        """Everything that is not computed yet, one row each."""
        self.step.clear()
        for row, tokens in enumerate(self.tokens):
            first = self.computed[row]
            self.step.add_row(np.array(tokens[first:], np.int64), first, self.tables[row])
            self.computed[row] = len(tokens)
        return self.step

    def append(self, tokens: Sequence[int]) -> None:
        """One more token for each row."""
        for row, token in zip(self.tokens, tokens, strict=True):
            row.append(int(token))


def decide_step(runner: CudaRunner, rows: Rows, ask: StepAsk) -> ForwardOutput:
    """One step, whose tokens every row gets."""
    ask.sampling.positions = np.array([len(tokens) for tokens in rows.tokens])
    output = runner.decide(rows.next_step(), ask)
    assert output.tokens is not None
    rows.append(output.tokens[: len(rows.tokens)].tolist())
    return output


def decide_tokens(runner: CudaRunner, rows: Rows, ask: StepAsk) -> list[int]:
    """One step; its tokens, which every row gets."""
    decide_step(runner, rows, ask)
    return [tokens[-1] for tokens in rows.tokens]


def step_ms(runner: CudaRunner, count: int, context: int, width: int, steps: int) -> float:
    """Median milliseconds of a step in which each of ``count`` rows computes ``width`` tokens."""
    rows = Rows(count, runner.embedding.shape[0], 1, [context] * count)
    rows.prefill(runner)
    ask = StepAsk(greedy(count), np.full(count, 0.5, np.float32))
    took: list[float] = []
    for _ in range(steps + 2):
        ask.sampling.positions = np.array([len(tokens) for tokens in rows.tokens])
        step = rows.next_step()
        began = time.perf_counter()
        runner.decide(step, ask)
        took.append((time.perf_counter() - began) * 1e3)
        for _ in range(width):
            rows.append([1] * count)
    return statistics.median(took[2:])
