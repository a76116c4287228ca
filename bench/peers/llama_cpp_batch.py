"""llama.cpp through llama-cpp-python: the same prompts at once, on a bfloat16 GGUF file.

The package's own ``Llama`` serves one sequence at a time, so this drives the library's batch
interface: all prompts in one batch, then one token of each sequence in every decode, greedily.
Prints one JSON line per concurrency. Arguments as for the other peers, with the GGUF file in
place of the model directory.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Sequence

import llama_cpp
import numpy as np

# Cells are padded to this many per sequence.
_CELLS = 256


class Decoder:
    """A model and a context that holds ``sequences`` rows of up to ``length`` tokens."""

    def __init__(self, path: str, sequences: int, length: int, prompt: int, threads: int) -> None:
        model_params = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), model_params)
        assert self.model, f"{path} cannot be loaded"
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = sequences * -(-length // _CELLS) * _CELLS
        params.n_seq_max = sequences
        params.n_batch = params.n_ubatch = max(512, sequences * prompt)
        params.n_threads = params.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        assert self.context, "no context"
        vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(vocab)
        self.batch = llama_cpp.llama_batch_init(params.n_batch, 0, 1)

    def clear(self) -> None:
        """Forget all sequences."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)

    def step(self, rows: Sequence[Sequence[int]], start: int) -> list[int]:
        """Append ``rows``, one a sequence, at position ``start``; returns the next of each."""
        batch, ends = self.batch, []
        at = 0
        for sequence, tokens in enumerate(rows):
            for offset, token in enumerate(tokens):
                batch.token[at] = token
                batch.pos[at] = start + offset
                batch.n_seq_id[at] = 1
                batch.seq_id[at][0] = sequence
                batch.logits[at] = offset == len(tokens) - 1
                at += 1
            ends.append(at - 1)
        batch.n_tokens = at
        assert llama_cpp.llama_decode(self.context, batch) == 0
        return [self._best(end) for end in ends]

    def _best(self, index: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self.context, index)
        address = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))
        return int(np.ctypeslib.as_array(address, (self.vocab_size,)).argmax())

    def close(self) -> None:
        """Free the library's memory."""
        llama_cpp.llama_batch_free(self.batch)
        llama_cpp.llama_free(self.context)
        llama_cpp.llama_model_free(self.model)


def main() -> None:
    """Generate once to warm up, then once for the clock, for each concurrency."""
    path, concurrencies, output, prompt, threads = sys.argv[1:6]
    length = int(prompt) + int(output)
    quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)  # kept: C calls it
    llama_cpp.llama_log_set(quiet, None)
    llama_cpp.llama_backend_init()
    for count in map(int, concurrencies.split(",")):
        decoder = Decoder(path, count, length, int(prompt), int(threads))
        prompts = [[100 + row, *range(5, 4 + int(prompt))] for row in range(count)]
        seconds = 0.0
        for _ in range(2):
            decoder.clear()
            started = time.perf_counter()
            tokens = decoder.step(prompts, 0)
            for position in range(int(prompt), length - 1):
                tokens = decoder.step([[token] for token in tokens], position)
            seconds = time.perf_counter() - started
        decoder.close()
        print(json.dumps({"concurrency": count, "tokens": count * int(output), "s": seconds}))


if __name__ == "__main__":
    main()
