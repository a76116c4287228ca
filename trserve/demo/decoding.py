"""Greedy decoding of many prompts at once by the pair, routed by R-Stitch, in plain torch.

The reference that the server is compared with: both models read every accepted token, so there
is no catching up, no slab and no scheduler. Knows nothing of grammar or accuracy.

R-Stitch (arXiv 2507.17307): the SLM's token is kept unless its normalised entropy exceeds tau;
then the LLM writes that token, and goes on writing until its own entropy is at most tau. What
the LLM writes is always kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer
from transformers import DynamicCache

from trserve.demo.modeling import load_checkpoint
from trserve.demo.tokenizer_build import EOS_ID, PAD_ID, load_tokenizer

SLM_ALONE: Final = math.inf
"""The tau that no entropy exceeds."""
LLM_ALONE: Final = -1.0
"""The tau that every entropy exceeds."""
MAX_NEW_TOKENS: Final = 200


@dataclass(frozen=True, slots=True)
class Routed:
    """One answer: its text without the end token, and who wrote how many tokens (end included)."""

    text: str
    tokens: int
    llm_tokens: int


def normalised_entropy(logits: torch.Tensor) -> torch.Tensor:
    """H(softmax(logits)) / ln(V), V the size of the last dimension; in [0, 1], float32.

    ``entr`` is 0 at p = 0, where ``p * log(p)`` would be NaN.
    """
    entropy: torch.Tensor = torch.special.entr(logits.float().softmax(-1)).sum(-1)
    return entropy / math.log(logits.shape[-1])


class _Reader:
    """One model with the cache of the batch: feeds tokens, returns last-position logits."""

    def __init__(self, model: Any, vocab: int, mask: torch.Tensor) -> None:
        self._model = model
        self._vocab = vocab
        self._cache = DynamicCache(config=model.config)
        self._mask = mask

    def feed(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits (rows, V) after ``ids`` (rows, n); rows of the model past V are cut off."""
        missing = self._cache.get_seq_length() + ids.shape[1] - self._mask.shape[1]
        if missing:
            self._mask = torch.cat([self._mask, self._mask.new_ones(len(ids), missing)], 1)
        # Left padding holds position 0 too; it is masked, so its position does not matter.
        positions = (self._mask.cumsum(1) - 1).clamp_min(0)[:, -ids.shape[1] :]
        logits: torch.Tensor = self._model(
            input_ids=ids,
            attention_mask=self._mask,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        return logits[:, -1, : self._vocab]


class Pair:
    """The SLM, the LLM and their tokenizer."""

    def __init__(self, slm: Any, llm: Any, tokenizer: Tokenizer) -> None:
        self.slm = slm
        self.llm = llm
        self.tokenizer = tokenizer

    @classmethod
    def load(cls, directory: Path) -> Pair:
        """Reads ``tiny`` and ``small`` under ``directory``, computing in float32."""
        slm, llm = (load_checkpoint(directory / name) for name in ("tiny", "small"))
        return cls(slm, llm, load_tokenizer(directory / "tiny"))

    @torch.inference_mode()
    def decode(
        self, prompts: list[str], tau: float, max_new_tokens: int = MAX_NEW_TOKENS
    ) -> list[Routed]:
        """Answers every prompt (already in ChatML), all in one batch."""
        vocab = self.tokenizer.get_vocab_size()
        ids, mask = self._left_padded(prompts)
        slm = None if tau == LLM_ALONE else _Reader(self.slm, vocab, mask)
        llm = None if tau == SLM_ALONE else _Reader(self.llm, vocab, mask)
        at_llm = torch.full((len(prompts),), slm is None)
        done = torch.zeros(len(prompts), dtype=torch.bool)
        written: list[torch.Tensor] = []
        by_llm: list[torch.Tensor] = []
        while not bool(done.all()) and len(written) < max_new_tokens:
            token, wrote, at_llm = _step(slm, llm, ids, at_llm, tau)
            token = token.masked_fill(done, PAD_ID)
            written.append(token)
            by_llm.append(wrote & ~done)
            done |= token == EOS_ID
            ids = token[:, None]
        return self._collect(torch.stack(written, 1), torch.stack(by_llm, 1))

    def _left_padded(self, prompts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        encoded = [self.tokenizer.encode(p, add_special_tokens=False).ids for p in prompts]
        width = max(map(len, encoded))
        ids = torch.tensor([[PAD_ID] * (width - len(row)) + row for row in encoded])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in encoded])
        return ids, mask

    def _collect(self, written: torch.Tensor, by_llm: torch.Tensor) -> list[Routed]:
        answers = []
        for row, wrote in zip(written.tolist(), by_llm.tolist(), strict=True):
            size = row.index(EOS_ID) if EOS_ID in row else len(row)
            tokens = min(size + 1, len(row))
            text = self.tokenizer.decode(row[:size])
            answers.append(Routed(text, tokens, sum(wrote[:tokens])))
        return answers


def _step(
    slm: _Reader | None,
    llm: _Reader | None,
    ids: torch.Tensor,
    at_llm: torch.Tensor,
    tau: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One token a row: (token, whether the LLM wrote it, whether the LLM writes the next)."""
    if llm is None or slm is None:
        only = slm or llm
        assert only is not None
        return only.feed(ids).argmax(-1), at_llm, at_llm
    slm_logits, llm_logits = slm.feed(ids), llm.feed(ids)
    wrote = at_llm | (normalised_entropy(slm_logits) > tau)
    token = torch.where(wrote, llm_logits.argmax(-1), slm_logits.argmax(-1))
    return token, wrote, wrote & (normalised_entropy(llm_logits) > tau)
