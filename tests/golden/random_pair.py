"""Pairs of tiny models with random weights, so that tests meet distributions no training made.

Writes checkpoints as a user would have them (safetensors, tokenizer.json, chat template,
generation config), the same bytes for the same seed. Rows of the head beyond the tokenizer exist
and are as large as the others, each model has an end-of-sequence id of its own, and the heads are
scaled so that a router's threshold really divides the steps. Knows nothing of trserve.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.golden.reference import LLM, SLM, Reference, Setting, Trace

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TOKENIZER_SIZE = 256 + len(SPECIALS)
VOCAB_SIZE = 272
CONTEXT = 512
MEAN_ENTROPY = 0.3
OUTPUT = 40
QUANTILES = (0.2, 0.5, 0.8)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SIZES = ((2, 64, 4, 2, 96), (3, 96, 6, 2, 160))
"""Layers, hidden size, heads, KV heads, intermediate size of the SLM and the LLM."""


@dataclass(frozen=True)
class RandomPair:
    """A pair on disk and the thresholds at which its steps divide."""

    slm: Path
    llm: Path
    taus: tuple[float, ...]


def build_random_pair(folder: Path, family: str = "qwen3", seed: int = 0) -> RandomPair:
    """Writes ``folder/slm`` and ``folder/llm`` and finds their thresholds."""
    paths = (folder / "slm", folder / "llm")
    samples = random_prompts(16, Random(f"calibrate {seed}"))
    for index, path in enumerate(paths):
        write_random_model(path, index, samples, family, seed)
    reference = Reference(*paths)
    taus = _thresholds(reference, samples)
    traces = [reference.run(prompt, _setting(taus[1])) for prompt in samples]
    for index, path in enumerate(paths):
        own = _end_token(traces, index)
        _write_json(path / "generation_config.json", {"eos_token_id": [TOKENIZER_SIZE - 1, own]})
    return RandomPair(*paths, taus)


def write_random_model(
    path: Path,
    index: int,
    samples: Sequence[Sequence[int]],
    family: str = "qwen3",
    seed: int = 0,
) -> None:
    """Writes the SLM (``index`` 0) or the LLM (1) of a pair; ``samples`` set its mean entropy."""
    model = _model(family, index, seed)
    _scale_head(model, samples)
    write_checkpoint(model, path, [TOKENIZER_SIZE - 1])


def random_prompts(count: int, rng: Random) -> list[list[int]]:
    """Token ids without specials; lengths around block sizes, and every third shares a prefix."""
    lengths = (1, 5, 15, 16, 17, 31, 32, 33, 48, 70)
    prefix = [rng.randrange(256) for _ in range(40)]
    prompts = []
    for index in range(count):
        own = [rng.randrange(256) for _ in range(lengths[index % len(lengths)])]
        prompts.append(prefix + own if index % 3 == 2 else own)
    return prompts


def byte_tokenizer(order: Random | None = None) -> Tokenizer:
    """One token a byte and three specials, no merges; ``order`` shuffles the ids of the bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if order is not None:
        order.shuffle(alphabet)
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    return tokenizer


def write_checkpoint(
    model: PreTrainedModel, path: Path, eos: Sequence[int], tokenizer: Tokenizer | None = None
) -> None:
    """Saves ``model`` with a tokenizer, its configuration and a generation configuration."""
    model.save_pretrained(path)
    (tokenizer or byte_tokenizer()).save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIALS[2],
        "pad_token": SPECIALS[0],
        "model_max_length": CONTEXT,
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(path / "tokenizer_config.json", settings)
    _write_json(path / "generation_config.json", {"eos_token_id": list(eos)})


def _model(family: str, index: int, seed: int) -> PreTrainedModel:
    layers, hidden, heads, kv_heads, intermediate = _SIZES[index]
    shape = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 16,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": False,
        # Large enough for attention to matter beside the residual stream.
        "initializer_range": 1.5 * hidden**-0.5,
        "bos_token_id": None,
        "pad_token_id": TOKENIZER_SIZE - 3,
        "eos_token_id": TOKENIZER_SIZE - 1,
    }
    torch.manual_seed(1000 * seed + index)
    if family == "llama":
        model: PreTrainedModel = LlamaForCausalLM(LlamaConfig(**shape))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**shape))
    model.train(False)
    return model


@torch.inference_mode()
def _scale_head(model: PreTrainedModel, prompts: Sequence[Sequence[int]]) -> None:
    """Scales the head until the mean entropy along the model's own greedy text is as wanted.

    A positive scale changes no arg max, so the text stays the same and the mean falls with the
    scale: bisection over logits that were computed once.
    """
    rows = [_greedy_logits(model, prompt) for prompt in prompts[:8]]
    logits = torch.cat(rows).double()
    low, high = 1e-3, 1e3
    for _ in range(60):
        middle = (low * high) ** 0.5
        probabilities = torch.softmax(logits * middle, dim=-1)
        mean = torch.special.entr(probabilities).sum(-1).mean() / torch.tensor(TOKENIZER_SIZE).log()
        low, high = (middle, high) if mean > MEAN_ENTROPY else (low, middle)
    model.lm_head.weight.mul_(low)


def _greedy_logits(model: PreTrainedModel, prompt: Sequence[int]) -> torch.Tensor:
    row = list(prompt)
    for _ in range(OUTPUT):
        logits = model(input_ids=torch.tensor([row])).logits[0, :, :TOKENIZER_SIZE]
        row.append(int(logits[-1].argmax()))
    written: torch.Tensor = logits[len(prompt) - 1 :]
    return written


def _setting(tau: float) -> Setting:
    return Setting(tau=tau, max_tokens=OUTPUT)


def _thresholds(reference: Reference, prompts: Sequence[Sequence[int]]) -> tuple[float, ...]:
    """Quantiles of the entropy over the steps of both models in routed decoding."""
    traces = [reference.run(prompt, _setting(MEAN_ENTROPY)) for prompt in prompts]
    entropies = torch.tensor([step.entropy for trace in traces for step in trace.steps])
    return tuple(round(float(q), 6) for q in torch.quantile(entropies, torch.tensor(QUANTILES)))


def _end_token(traces: Sequence[Trace], model: int) -> int:
    """A token to be ``model``'s own end: one that ends some of the texts, neither all nor none.

    The SLM's is one that it often proposes where the router discards it, so that a discarded end
    occurs; the LLM's is one that the SLM writes, so that the union of both sets matters.
    """
    kept = model == LLM
    proposed = Counter(
        step.token
        for trace in traces
        for step in trace.steps
        if step.model == SLM and step.kept == kept
    )
    texts = Counter(token for trace in traces for token in set(trace.tokens))
    fair = [token for token in proposed if 0 < texts[token] <= len(traces) // 3]
    return max(fair, key=lambda token: (proposed[token], token))


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2))
