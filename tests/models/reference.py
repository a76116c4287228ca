"""Tiny random models of every supported architecture, with transformers as the reference."""

import json
from pathlib import Path

import numpy as np
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from trserve.models.loading import load_model
from trserve.models.spec import ModelSpec, read_spec
from trserve.workers.kv_cache import KVCache
from trserve.workers.runner import TorchRunner
from trserve.workers.step import StepInputs

_COMMON = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
_EXPERTS = {
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
}

CASES = {
    "qwen3": (
        Qwen3ForCausalLM,
        Qwen3Config,
        {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16},
    ),
    "qwen3-bias-tied": (
        Qwen3ForCausalLM,
        Qwen3Config,
        {
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "qwen2": (
        Qwen2ForCausalLM,
        Qwen2Config,
        {"num_attention_heads": 4, "num_key_value_heads": 4},
    ),
    "llama-bias": (
        LlamaForCausalLM,
        LlamaConfig,
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 12,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "llama3-rope": (
        LlamaForCausalLM,
        LlamaConfig,
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "rope_parameters": _LLAMA3,
        },
    ),
    "linear-rope": (
        LlamaForCausalLM,
        LlamaConfig,
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.5},
        },
    ),
    "yarn-rope": (
        Qwen2ForCausalLM,
        Qwen2Config,
        {"num_attention_heads": 3, "num_key_value_heads": 1, "rope_parameters": _YARN},
    ),
    "yarn-rope-options": (
        Qwen3ForCausalLM,
        Qwen3Config,
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "rope_parameters": {
                **_YARN,
                "mscale": 0.8,
                "mscale_all_dim": 1.4,
                "beta_fast": 8,
                "beta_slow": 0.5,
                "truncate": False,
            },
        },
    ),
    "experts": (Qwen3MoeForCausalLM, Qwen3MoeConfig, {**_EXPERTS, "norm_topk_prob": True}),
    "experts-in-some-layers": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {
            **_EXPERTS,
            "num_hidden_layers": 5,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "norm_topk_prob": False,
            "tie_word_embeddings": True,
            "attention_bias": True,
        },
    ),
    "zero-layer": (
        Qwen3ForCausalLM,
        Qwen3Config,
        {
            "num_hidden_layers": 0,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 16,
        },
    ),
}


def make_model(case: str, **changes) -> PreTrainedModel:
    """A random float32 model whose norms and biases are far from ones and zeros."""
    model_class, config_class, options = CASES[case]
    torch.manual_seed(len(case))
    model = model_class(config_class(**{**_COMMON, **options, **changes})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.3)
            else:
                parameter.normal_(0.0, 0.25)
    return model


def save(model: PreTrainedModel, path: Path, **options) -> Path:
    model.save_pretrained(path, **options)
    return path


def logits_of(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """Logits after every token, [len(tokens), V]."""
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


class Harness:
    """A runner with sequences in shuffled, non-contiguous blocks; test-side bookkeeping only."""

    def __init__(
        self,
        path: Path,
        *,
        num_blocks: int = 64,
        block_size: int = 8,
        dtype: torch.dtype = torch.float32,
        tokenizer_size: int | None = None,
        seed: int = 0,
        int8: bool = False,
    ) -> None:
        self.spec: ModelSpec = read_spec(path)
        self.kv = KVCache(self.spec, num_blocks=num_blocks, block_size=block_size, dtype=dtype)
        self.runner = TorchRunner(
            load_model(path, self.spec, dtype=dtype, int8=int8),
            self.kv,
            tokenizer_size=tokenizer_size or self.spec.vocab_size,
        )
        self.step = StepInputs(
            max_tokens=1024, max_rows=64, max_blocks_per_row=num_blocks, block_size=block_size
        )
        self._free = np.random.default_rng(seed).permutation(num_blocks).astype(np.int32)
        self._taken = 0

    def table(self, length: int) -> np.ndarray:
        blocks = -(-length // self.kv.block_size)
        taken = self._free[self._taken : self._taken + blocks]
        assert len(taken) == blocks
        self._taken += blocks
        return taken

    def forward(self, rows, also=None):
        """``rows``: (tokens, start, block table) of each; ``also`` as the runner has it."""
        self.step.clear()
        for tokens, start, table in rows:
            self.step.add_row(np.asarray(tokens), start, table)
        return self.runner.forward(self.step, also)


def rewrite_config(path: Path, **changes) -> None:
    """Change or (with None) remove keys of a checkpoint's ``config.json``."""
    config = json.loads((path / "config.json").read_text())
    config.update(changes)
    kept = {key: value for key, value in config.items() if value is not None}
    (path / "config.json").write_text(json.dumps(kept))
