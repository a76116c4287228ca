"""The paper's method, the baseline of the edge study, from its description (arXiv 2504.07878).

The SLM has no KV cache: every step computes the whole row. A confidence decides on each token;
below the threshold the row is turned into text without its special tokens, one HTTP call asks for
one token's text, and the first id of that text, encoded with a space before it, is the next token.
Text loses what it loses: chat marks, and tokens inside words. Written for this study from that
description; none of the original's code.

Kinder than the original where it does not say: one connection is kept for all calls, there is no
TLS, logits are computed for the last position alone, and an error ends the program, not the answer
in silence. Knows a model, a confidence and an address; nothing of servers, proxies or tables.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import orjson
import torch

from bench.edge_measured import Answer
from bench.http_client import Connection, encode
from trserve.gateway.tokenizer import Tokenizer

CALL_TIMEOUT_S: Final = 60.0
IDLE_S: Final = 5.0
"""A connection that was of no use for so long may have been closed: trserve waits 15 s for the head
of the first request."""

_COMPLETIONS: Final = "/v1/completions"


class FullPrefill:
    """An SLM without a KV cache.

    Args:
        net: a transformers model.
        size: ids of the tokenizer; logits past it are never chosen.

    Attributes:
        seconds: spent computing since it was made.
    """

    def __init__(self, net: Any, size: int) -> None:
        self._net = net.eval()
        self._size = size
        self.seconds = 0.0

    @classmethod
    def drawn(cls, config: dict[str, Any], size: int, dtype: torch.dtype) -> FullPrefill:
        """The shape of ``config`` (Llama's) with weights drawn at random."""
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        shape = {key: value for key, value in config.items() if key != "architectures"}
        net: Any = LlamaForCausalLM(LlamaConfig(**shape))
        return cls(net.to(dtype), size)

    @classmethod
    def stored(cls, path: Path, size: int) -> FullPrefill:
        """A checkpoint in float32."""
        from transformers import AutoModelForCausalLM

        return cls(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), size)

    @torch.inference_mode()
    def next(self, row: Sequence[int], *, states: bool = False) -> tuple[int, torch.Tensor | None]:
        """The greedy token after ``row``, and with ``states`` the last hidden state [1, H]."""
        began = time.perf_counter()
        out = self._net(
            input_ids=torch.tensor([list(row)]),
            use_cache=False,
            logits_to_keep=1,
            output_hidden_states=states,
        )
        token = int(out.logits[0, -1, : self._size].argmax())
        self.seconds += time.perf_counter() - began
        return token, out.hidden_states[-1][:, -1] if states else None


@dataclass(frozen=True)
class Seen:
    """What a confidence may look at: the request's seed, the place in the answer, the state."""

    seed: int
    position: int
    state: torch.Tensor | None


Confidence = Callable[[Seen], float]


@dataclass
class PaperMethod:
    """One edge device of it.

    ``reads_states``: whether the confidence looks at hidden states. ``service_s`` is what the LLM
    is known to take for a call, to tell it from the network. ``spaced``: whether a space is put
    before the LLM's text, as the original does. ``asked_at``: when the connection was last of use;
    one that idled is opened anew, as any client must.
    """

    slm: FullPrefill
    tokenizer: Tokenizer
    cloud: Connection
    model: str
    confidence: Confidence
    reads_states: bool = False
    service_s: float = 0.0
    spaced: bool = True
    asked_at: float = field(default_factory=time.perf_counter)

    async def answer(
        self, prompt: Sequence[int], seed: int, threshold: float, most: int, ends: frozenset[int]
    ) -> Answer:
        """Up to ``most`` tokens, greedily; an id of ``ends`` is the last."""
        answer, row = Answer(), list(prompt)
        began, computed = time.perf_counter(), self.slm.seconds
        while answer.tokens < most and (not answer.tokens or row[-1] not in ends):
            token, state = self.slm.next(row, states=self.reads_states)
            answer.drawn += 1
            if self.confidence(Seen(seed, answer.tokens, state)) < threshold:
                token = await self._ask(row, answer, token, ends)
            row.append(token)
            answer.times.append(time.perf_counter() - began)
        answer.compute_s = self.slm.seconds - computed
        answer.token_ids = row[len(prompt) :]
        answer.text = self.tokenizer.decode(answer.token_ids, skip_special_tokens=True)
        return answer

    async def _ask(self, row: Sequence[int], answer: Answer, own: int, ends: frozenset[int]) -> int:
        """The next token of the LLM; ``own`` where its text is none."""
        text = self.tokenizer.decode(list(row), skip_special_tokens=True)
        asked = {"model": self.model, "prompt": text, "max_tokens": 1, "temperature": 0}
        request = encode("POST", _COMPLETIONS, orjson.dumps(asked))
        began = time.perf_counter()
        if began - self.asked_at > IDLE_S:
            self.cloud = await self.cloud.again()
        body = await self.cloud.exchange(request, CALL_TIMEOUT_S)
        self.asked_at = time.perf_counter()
        took = self.asked_at - began
        answer.routed += 1
        answer.visits += 1
        answer.service_s += self.service_s
        answer.network_s += max(0.0, took - self.service_s)
        if answer.visits > 1:
            answer.bytes += len(request) + len(self.cloud.head) + 4 + len(body)
            answer.handoffs += 2
        (choice,) = orjson.loads(body)["choices"]
        found = choice["text"]
        if not found and choice["finish_reason"] == "stop" and ends:
            return min(ends)
        ids = self.tokenizer.encode(f" {found}" if self.spaced else found, add_special_tokens=False)
        return ids[0] if ids else own
