"""What 8-bit weights do to a model's logits, beside what bfloat16 does, against float32.

One forward over a text (this repository's README) for each precision; every position counts. The
speed that 8 bits buy is ``bench.engine``'s to tell. Knows no server.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from tokenizers import Tokenizer

from bench.common import Row, parser, report, track
from trserve.models.loading import load_model
from trserve.models.spec import read_spec
from trserve.workers.kv_cache import KVCache
from trserve.workers.runner import TorchRunner
from trserve.workers.step import StepInputs

TEXT: Final = Path(__file__).parent.parent / "README.md"
_CHUNK: Final = 256
_BLOCK: Final = 16
_PRECISIONS: Final = (("bfloat16", "none"), ("bfloat16", "int8"), ("float32", "int8"))


def logits_of(path: Path, tokens: Sequence[int], dtype: torch.dtype, *, int8: bool) -> torch.Tensor:
    """Logits after every token, float32 [len(tokens), V], by the engine's own forward pass."""
    spec = read_spec(path)
    blocks = -(-len(tokens) // _BLOCK)
    kv = KVCache(spec, num_blocks=blocks, block_size=_BLOCK, dtype=dtype)
    decoder = load_model(path, spec, dtype=dtype, int8=int8)
    runner = TorchRunner(decoder, kv, tokenizer_size=spec.vocab_size)
    inputs = StepInputs(max_tokens=_CHUNK, max_rows=1, max_blocks_per_row=blocks, block_size=_BLOCK)
    table, found = np.arange(blocks, dtype=np.int32), []
    for start in range(0, len(tokens), _CHUNK):
        chunk = np.asarray(tokens[start : start + _CHUNK])
        inputs.clear()
        inputs.add_row(chunk, start, table)
        output = runner.forward(inputs, np.arange(len(chunk)))
        assert output.also is not None
        found.append(runner.logits(output.also))
    return torch.cat(found)


def compare(logits: torch.Tensor, exact: torch.Tensor) -> Row:
    """How far ``logits`` are from ``exact``, both [T, V]: differences, nats, and agreement."""
    change = (logits - exact).abs()
    ours, theirs = logits.log_softmax(-1), exact.log_softmax(-1)
    return {
        "mean_logit_change": float(change.mean()),
        "max_logit_change": float(change.max()),
        "kl_nats": float((theirs.exp() * (theirs - ours)).sum(-1).mean()),
        "same_top_token": float((ours.argmax(-1) == theirs.argmax(-1)).float().mean()),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Compare every precision with float32 and report."""
    args = _arguments(argv)
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    tokens = tokenizer.encode(TEXT.read_text()).ids[: args.tokens]
    exact = logits_of(args.model, tokens, torch.float32, int8=False)
    rows: list[Row] = []
    for dtype, quantization in track(_PRECISIONS, "precisions"):
        found = logits_of(args.model, tokens, getattr(torch, dtype), int8=quantization == "int8")
        named = {"dtype": dtype, "quantization": quantization, "tokens": len(tokens)}
        rows.append(named | compare(found, exact))
    report("quantization", args, rows, f"{args.model.name} against float32, on {TEXT.name}")


def _arguments(argv: Sequence[str] | None) -> Any:
    made = parser("quantization", "What fewer bits do to a model's logits.")
    made.add_argument("--model", type=Path, required=True, help="checkpoint directory")
    made.add_argument("--tokens", type=int, default=1500, help="tokens of the text")
    args = made.parse_args(argv)
    if args.quick:
        args.tokens = min(args.tokens, 300)
    return args


if __name__ == "__main__":
    main()
