"""One forward pass over the rows of a step, on the CPU: by compiled kernels where there are some
that know the decoder, by torch otherwise.

Knows the decoder, the KV cache and the step's arrays; nothing of requests, sampling or routing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from trserve.errors import ConfigError
from trserve.models.attention import PagedAttention
from trserve.models.decoder import Decoder
from trserve.models.native.decoder import NativeDecoder
from trserve.workers.kv_cache import KVCache
from trserve.workers.step import StepInputs


@dataclass(slots=True)
class ForwardOutput:
    """What a step computed, by row.

    ``logits`` is [B, vocab_size] raw float32, columns past the tokenizer at minus infinity;
    ``hidden`` is [B, hidden_size] float32, after the final norm, of each row's last token;
    ``also`` [K, hidden_size] the same of the further tokens that were asked for; ``tap``
    [B, hidden_size] float32, what the last layer's MLP read at each row's last token, if kept.

    A step that decided by itself (``in_step``) has ``tokens`` int64 [B], and may have
    ``destinations``, B numbers as ``Routing.destinations`` returns them, with ``scores`` float32
    [B]. Its tensors then lie on the device, where they wait for whoever wants more than that.
    """

    logits: torch.Tensor
    hidden: torch.Tensor
    also: torch.Tensor | None = None
    tap: torch.Tensor | None = None
    tokens: NDArray[np.int64] | None = None
    destinations: list[int] | None = None
    scores: NDArray[np.float32] | None = None

    def on_host(self) -> ForwardOutput:
        """The same, its tensors on the host."""
        if self.logits.is_cpu:
            return self
        tap = None if self.tap is None else self.tap.cpu()
        return replace(self, logits=self.logits.cpu(), hidden=self.hidden.cpu(), tap=tap)

    def tensor_of(self, tokens: NDArray[np.int64]) -> torch.Tensor:
        """``tokens`` [B] where the logits are."""
        found = torch.from_numpy(tokens)
        return found if self.logits.is_cpu else found.to(self.logits.device)

    def rows(self, rows: list[int]) -> ForwardOutput:
        """Those of ``rows`` alone, without the further tokens."""
        return ForwardOutput(
            logits=self.logits[rows],
            hidden=self.hidden[rows],
            tap=None if self.tap is None else self.tap[rows],
            tokens=None if self.tokens is None else self.tokens[rows],
            destinations=None
            if self.destinations is None
            else [self.destinations[r] for r in rows],
            scores=None if self.scores is None else self.scores[rows],
        )


class Runner(Protocol):
    """What a worker's steps need of whatever computes them; :class:`TorchRunner` is the usual one.

    Attributes:
        on_layer: called now and then in a step: this worker is not hung.
        heartbeat: address of a word that may be set instead.
        began_ns: set before each step to when it was decided (``time.monotonic_ns``).
    """

    heartbeat: int
    began_ns: int
    on_layer: Callable[[], None]

    def forward(self, step: StepInputs, also: NDArray[np.int64] | None = None) -> ForwardOutput:
        """Compute ``step``."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Raw logits of hidden states after the final norm."""


@runtime_checkable
class SubmittingRunner(Protocol):
    """A runner whose steps a device computes, while the host has nothing to do but to wait.

    Attributes:
        on_submitted: called in every step, as soon as the device has it: what is done there takes
            none of the step's time. Where the host launches a step operation by operation, before
            the first of its layers. Once more where the device has to compute the step again.
    """

    on_submitted: Callable[[], None]


@runtime_checkable
class SleepingRunner(SubmittingRunner, Protocol):
    """One whose host sleeps while the device computes, in the place of a core that only waits.

    Attributes:
        on_waking: called when it has slept, with some 0.2 ms to go until the output is there.
    """

    on_waking: Callable[[], None]


class TorchRunner:
    """Runs a decoder over a KV cache; one forward for all rows, whatever their lengths.

    Args:
        tokenizer_size: number of token ids that the tokenizer knows; the checkpoint's vocabulary
            may be padded beyond it.

    Attributes:
        on_layer: called before each layer of a step that torch computes.
        heartbeat: address of the word that compiled steps set instead; 0 for none.
        began_ns: unused; emulated steps end so long after it.
    """

    def __init__(self, decoder: Decoder, kv: KVCache, *, tokenizer_size: int) -> None:
        self.heartbeat = 0
        self.began_ns = 0
        self.on_layer: Callable[[], None] = _nothing_more
        self.decoder = decoder
        self.kv = kv
        self._head = decoder.lm_head(tokenizer_size)
        self._attention = PagedAttention(decoder.spec, kv)
        self._inputs: _InputViews | None = None
        self._native = NativeDecoder(decoder, kv, self._head) if decoder.native else None

    def forward(self, step: StepInputs, also: NDArray[np.int64] | None = None) -> ForwardOutput:
        """Compute ``step``: its KV is stored, and the logits after each row's last token returned.

        ``also`` names further tokens of the step, by index, whose hidden states are wanted. A row
        is independent of the others: NaNs of one row never reach another. What is returned may be
        overwritten by the next call.
        """
        native = self._native
        if native is not None and step.num_tokens <= native.max_tokens:
            return ForwardOutput(*native.forward(step, also, self.heartbeat))
        return self._forward(step, also)

    def keep_tap(self) -> None:
        """Give ``tap`` with every step from now on. ConfigError for a model without layers."""
        if not self.decoder.layers:
            raise ConfigError("a router reads the last layer's input, but the model has no layers")
        self.decoder.keeps_tap = True
        if self._native is not None:
            self._native.keep_tap()

    @torch.inference_mode()
    def _forward(self, step: StepInputs, also: NDArray[np.int64] | None) -> ForwardOutput:
        inputs = self._inputs
        if inputs is None or inputs.step is not step:
            inputs = self._inputs = _InputViews(step)
        tokens, rows = step.num_tokens, step.num_rows
        buffers = self.decoder.buffers(tokens)
        self._attention.plan(step, buffers.qkv, buffers.attended)
        length = int(step.kv_len[:rows].max())
        last = None if step.decode_only else inputs.query_start[1 : rows + 1] - 1
        if also is not None:
            last = torch.cat((inputs.query_start[1 : rows + 1] - 1, torch.from_numpy(also)))
        hidden = self.decoder.forward(
            inputs.token_ids[:tokens],
            inputs.positions[:tokens],
            length,
            self,
            last,
        )
        further = None
        if also is not None:
            hidden, further = hidden[:rows], hidden[rows:]
        tap = self.decoder.tap[:rows] if self.decoder.tap is not None else None
        return ForwardOutput(logits=self.logits(hidden), hidden=hidden, also=further, tap=tap)

    def run(self, layer: int) -> None:
        """Attend in ``layer``: the decoder's call in a step."""
        self.on_layer()
        self._attention.run(layer)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Raw logits of hidden states after the final norm; shapes as in :class:`ForwardOutput`."""
        return self._head(hidden.to(self.decoder.dtype)).float()


@runtime_checkable
class _Tapped(Protocol):
    def keep_tap(self) -> None:
        """See :meth:`TorchRunner.keep_tap`."""


@runtime_checkable
class _Embedding(Protocol):
    embedding: torch.Tensor


def keep_tap(runner: Runner) -> None:
    """Make ``runner`` give ``tap`` with every step. ConfigError where it has no layers to tap."""
    if not isinstance(runner, _Tapped):
        raise ConfigError("a router reads the last layer's input, which emulated devices lack")
    runner.keep_tap()


def embedding_of(runner: Runner) -> torch.Tensor | None:
    """The input embedding of the model that ``runner`` runs, where it is; None if it has none."""
    found = runner.decoder if isinstance(runner, TorchRunner) else runner
    return found.embedding if isinstance(found, _Embedding) else None


def _nothing_more() -> None:
    """Nobody waits for a sign of life."""


class _InputViews:
    """Torch views of a step's arrays: made once, as both sides share the memory."""

    __slots__ = ("positions", "query_start", "step", "token_ids")

    def __init__(self, step: StepInputs) -> None:
        self.step = step
        self.token_ids = torch.from_numpy(step.token_ids)
        self.positions = torch.from_numpy(step.positions)
        self.query_start = torch.from_numpy(step.query_start)
