"""Signals of uncertainty that routers decide on. Knows no router.

All are of p = softmax(logits) over the ids of the tokenizer: columns past ``tokenizer_size`` are
padding and left out, so that a model whose rows are padded more than another's is measured with
the same yardstick. Each takes logits float32 [B, V or more], raw, and returns float32 [B] within
1e-6 of the formula; NaN for rows that hold a NaN or plus infinity. Minus infinity is a probability
of 0. Where there are compiled kernels, on the CPU or a GPU, one pass over a row finds all of them;
torch does the work otherwise, in one pass for each of its operations.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import torch

from trserve.models.native.library import Library, load_library

if TYPE_CHECKING:
    from trserve.models.cuda.ops import Epilogue

_ROW_WISE: Final = 8192
"""From this many columns on torch takes a row at a time, as what one pass leaves in the cache the
next reads, and the largest logits are found sooner by the kernels."""
_LOWEST: Final = -1000.0
"""Of a log-probability; e to that is 0, and 0 times it is not NaN."""


def all_signals(logits: torch.Tensor, tokenizer_size: int) -> torch.Tensor:
    """float32 [3, B]: the three below, in their order."""
    library = _kernels(logits)
    if library is not None:
        out = torch.empty(3, len(logits))
        library.functions.trs_signals(*_rows(logits), tokenizer_size, out.data_ptr())
        return out
    if logits.is_cuda:
        found = _on_gpu(logits, tokenizer_size)
        entropy = found.entropy / math.log(tokenizer_size)
        return torch.stack((entropy, found.top_probability, found.margin))
    signals = (_entropies, _top_probabilities, _margins)
    return torch.stack([signal(logits[:, :tokenizer_size]) for signal in signals])


def normalized_entropy(logits: torch.Tensor, tokenizer_size: int) -> torch.Tensor:
    """Entropy over its maximum: H = -sum p ln p / ln V, in 0 to 1."""
    if logits.is_cuda:
        return _on_gpu(logits, tokenizer_size).entropy / math.log(tokenizer_size)
    if _kernels(logits) is not None:
        return all_signals(logits, tokenizer_size)[0]
    return _entropies(logits[:, :tokenizer_size])


def top_probability(logits: torch.Tensor, tokenizer_size: int) -> torch.Tensor:
    """The largest probability: 1 / sum exp(z - max z)."""
    if logits.is_cuda:
        return _on_gpu(logits, tokenizer_size).top_probability
    if _kernels(logits) is not None:
        return all_signals(logits, tokenizer_size)[1]
    return _top_probabilities(logits[:, :tokenizer_size])


def probability_margin(logits: torch.Tensor, tokenizer_size: int) -> torch.Tensor:
    """The largest probability minus the second largest; 0 where two are equal."""
    if logits.is_cuda:
        return _on_gpu(logits, tokenizer_size).margin
    if _kernels(logits) is not None:
        return all_signals(logits, tokenizer_size)[2]
    return _margins(logits[:, :tokenizer_size])


def largest_logits(logits: torch.Tensor, tokenizer_size: int, count: int) -> torch.Tensor:
    """float32 [B, count]: each row's largest logits in falling order; NaNs may be passed over."""
    library = _kernels(logits) if tokenizer_size >= _ROW_WISE else None
    if library is None:
        return logits[:, :tokenizer_size].topk(count, dim=-1).values
    out = torch.empty(len(logits), count)
    library.functions.trs_largest(*_rows(logits), tokenizer_size, count, out.data_ptr())
    return out


def _kernels(logits: torch.Tensor) -> Library | None:
    """The compiled kernels, where they can read ``logits``."""
    readable = logits.dtype == torch.float32 and logits.is_cpu and logits.stride(1) == 1
    return load_library() if readable else None


def _on_gpu(logits: torch.Tensor, tokenizer_size: int) -> Epilogue:
    """All signals, entropy in nats; may be captured in a graph."""
    from trserve.models.cuda.ops import Epilogue, epilogue

    found = Epilogue.allocate(len(logits), logits.device)
    epilogue(logits, tokenizer_size, found)
    return found


def _rows(logits: torch.Tensor) -> tuple[int, int, int]:
    return logits.data_ptr(), len(logits), logits.stride(0)


def _entropies(valid: torch.Tensor) -> torch.Tensor:
    if valid.shape[1] >= _ROW_WISE:
        return torch.stack([_entropy(*_exponentials(row)) for row in valid])
    log_p = torch.log_softmax(valid, dim=-1)
    entropy = -(log_p.exp() * log_p.clamp(min=_LOWEST)).sum(dim=-1)
    return entropy.div_(math.log(valid.shape[1]))


def _top_probabilities(valid: torch.Tensor) -> torch.Tensor:
    return (valid.amax(dim=-1) - valid.logsumexp(dim=-1)).exp_()


def _margins(valid: torch.Tensor) -> torch.Tensor:
    largest = (valid.topk(2, dim=-1).values - valid.logsumexp(dim=-1, keepdim=True)).exp_()
    return largest[:, 0] - largest[:, 1]


def _exponentials(row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """z - max z and its exponentials, [V] each."""
    shifted = (row - row.amax()).clamp_(min=_LOWEST)
    return shifted, shifted.exp()


def _entropy(shifted: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """H = ln s - sum w d / s over ln V, with w = exp(d) and s = sum w."""
    total = weights.sum()
    return (total.log() - weights.dot(shifted) / total) / math.log(len(weights))
