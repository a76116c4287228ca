"""Writes ``reference.npz``: what transformers computes from the same file, in float32.

Run as ``python -m tests.realmodel.make_reference`` after a change of the prompts; it takes two
minutes. Prints the smallest margin between the first and the second choice of a greedy step:
unless it is far above the tolerance of the tests, equal tokens would be luck.
"""

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from tests.realmodel.smollm2 import MESSAGES, NEW_TOKENS, TEXTS, fetch

REFERENCE = Path(__file__).parent / "reference.npz"
COLUMNS = np.arange(0, 49152, 192)
"""Ids whose logits are stored, after every token of the prompt."""


def reference_model(gguf: Path):
    return AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    ).eval()


def reference_tokenizer(gguf: Path):
    return AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)


def prompts(tokenizer) -> list[list[int]]:
    chat = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    return [tokenizer.encode(text, add_special_tokens=False) for text in (chat, *TEXTS)]


@torch.no_grad()
def main() -> None:
    gguf = fetch()
    model, arrays, margins = reference_model(gguf), {"columns": COLUMNS}, []
    for number, prompt in enumerate(prompts(reference_tokenizer(gguf))):
        tokens = list(prompt)
        for _ in range(NEW_TOKENS):
            logits = model(torch.tensor([tokens])).logits[0, -1]
            first, second = logits.topk(2).values.tolist()
            margins.append(first - second)
            tokens.append(int(logits.argmax()))
        arrays[f"tokens{number}"] = np.array(tokens, np.int32)
        arrays[f"length{number}"] = np.array(len(prompt))
        logits = model(torch.tensor([prompt])).logits[0]
        arrays[f"logits{number}"] = logits[:, COLUMNS].numpy()
    np.savez_compressed(REFERENCE, **arrays)
    print(f"smallest margin {min(margins):.4f}, {REFERENCE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
