"""What the prefix cache saves: time to the first token of a prompt, and of the same prompt again.

One model alone through ``trserve.Engine``, in bfloat16, the worker process and all. Each row is
one prompt of random ids that nothing has seen; the last row holds the medians. ``cached_tokens``
is what ``usage`` says of a third request with that prompt, as a stream carries no usage.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from bench.common import Row, parser, report, track
from trserve import Engine
from trserve.models.spec import read_spec

PROMPT_TOKENS: Final = 4_000
OUTPUT_TOKENS: Final = 4
REPEATS: Final = 5
QUICK_REPEATS: Final = 2
TARGET: Final = 20.0
_OPTIONS: Final[dict[str, Any]] = {
    "max_tokens": OUTPUT_TOKENS,
    "temperature": 0,
    "ignore_eos": True,
}


def ttft_ms(engine: Engine, prompt: Sequence[int]) -> float:
    """Milliseconds from the call to the first committed token."""
    started = time.perf_counter()
    stream = engine.stream(prompt, **_OPTIONS)
    first = next(part for part in stream if part.token_ids)
    elapsed = time.perf_counter() - started
    assert first.token_ids
    for _ in stream:  # to its end, so that nothing of it runs beside the next one
        pass
    return elapsed * 1e3


def measure(engine: Engine, prompt: Sequence[int]) -> Row:
    """One prompt, asked twice for the clock and a third time for its usage."""
    first, second = ttft_ms(engine, prompt), ttft_ms(engine, prompt)
    again = engine.generate(prompt, **_OPTIONS)
    assert not isinstance(again, list)
    return {
        "prompt_tokens": len(prompt),
        "first_ttft_ms": first,
        "second_ttft_ms": second,
        "ratio": first / second,
        "cached_tokens": again.usage["prompt_tokens_details"]["cached_tokens"],
    }


def medians(rows: Sequence[Row]) -> Row:
    """The median of every column."""
    return {"row": "median"} | {
        key: statistics.median(row[key] for row in rows) for key in rows[0] if key != "row"
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and report; say whether the target is met."""
    args = _arguments(argv)
    vocab, dice = read_spec(args.model).vocab_size, random.Random(args.seed)
    prompts = [
        [dice.randrange(vocab) for _ in range(args.prompt_tokens)] for _ in range(args.repeats)
    ]
    settings = {"models": str(args.model), "dtype": "bfloat16", "threads": (args.threads,)}
    with Engine(**settings, max_model_len=args.prompt_tokens + 64) as engine:
        # Two warm-ups: whatever a first prompt, long and short, makes once is made.
        warm = [dice.randrange(vocab) for _ in range(args.prompt_tokens // 4)]
        for _ in range(2):
            ttft_ms(engine, warm)
        asked = enumerate(track(prompts, "prompts"))
        rows = [{"row": str(at)} | measure(engine, prompt) for at, prompt in asked]
    rows.append(medians(rows))
    report("prefix", args, rows, f"{args.model.name}, bfloat16, {args.threads} threads")
    ratio = rows[-1]["ratio"]
    print(f"the second is {ratio:.0f} times sooner; wanted: {TARGET:.0f} or more")


def _arguments(argv: Sequence[str] | None) -> Any:
    made = parser("prefix", "Time to the first token with and without a cached prompt.")
    made.add_argument("--model", type=Path, required=True, help="checkpoint directory")
    made.add_argument("--prompt-tokens", type=int, default=PROMPT_TOKENS)
    made.add_argument("--repeats", type=int, default=REPEATS, help="different prompts")
    made.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    made.add_argument("--seed", type=int, default=0, help="of the prompts")
    args = made.parse_args(argv)
    if args.quick:
        args.repeats = min(args.repeats, QUICK_REPEATS)
    return args


if __name__ == "__main__":
    main()
