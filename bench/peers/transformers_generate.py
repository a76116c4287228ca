"""transformers ``generate``: one static batch of the same prompts, on the same weights.

Prints one JSON line per concurrency. Arguments: model directory, concurrencies, output tokens,
prompt tokens, threads.
"""

from __future__ import annotations

import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    """Generate once to warm up, then once for the clock, for each concurrency."""
    path, concurrencies, output, prompt, threads = sys.argv[1:6]
    torch.set_num_threads(int(threads))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    options = {"do_sample": False, "min_new_tokens": int(output), "max_new_tokens": int(output)}
    for count in map(int, concurrencies.split(",")):
        ids = torch.arange(5, 5 + int(prompt)).repeat(count, 1)
        seconds = 0.0
        for _ in range(2):
            started = time.perf_counter()
            found = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
            seconds = time.perf_counter() - started
        assert found.shape[1] == int(prompt) + int(output)
        print(json.dumps({"concurrency": count, "tokens": count * int(output), "s": seconds}))


if __name__ == "__main__":
    main()
