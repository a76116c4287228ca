"""Trains the routers of the embedded pair: ``python -m trserve.training.demo`` (make demo-routers).

The prompts are generated as the models' own training data is, from seeds that nothing is measured
on, and none of them is a held-out problem. The same seed on the same machine gives the same files.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from trserve.demo import ROUTERS_DIR
from trserve.demo.grammar import training_example
from trserve.demo.tokenizer_build import messages
from trserve.training.collect import Source
from trserve.training.command import ROUTERS, Job, say, show, train
from trserve.training.fit import Recipe, Setting
from trserve.training.prompts import TrainingPrompt
from trserve.training.r2r import Shape
from trserve.training.report import write

PROMPTS: Final = 16_000
CITER_PROMPTS: Final = 4_000
"""Fewer: every row of them at which the models differ is rolled out four times."""
MAX_TOKENS: Final = 200
SEED: Final = 31_337
"""Of the prompts; the pair is measured on seeds 5, 77, 2718 and 4242."""
SHAPE: Final = Shape(dims=(128, 128), expansion=2)
"""As float32 below a megabyte, which an expansion of 4 is not."""
STEPS: Final = {"r2r": 3000, "citer": 3000, "co-llm": 2000, "confidence": 4000}
RATE: Final = 2e-3
BATCH: Final = 512


def demo_prompts(count: int, seed: int = SEED) -> list[TrainingPrompt]:
    """``count`` conversations of the training generator."""
    rng = random.Random(seed)
    problems = [training_example(rng) for _ in range(count)]
    return [TrainingPrompt(messages(problem), problem.answer) for problem in problems]


def main(argv: Sequence[str] | None = None) -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(
        prog="python -m trserve.training.demo", description="Trains the embedded pair's routers."
    )
    parser.add_argument("--router", nargs="*", choices=ROUTERS, default=ROUTERS)
    parser.add_argument("--prompts", type=int, default=PROMPTS, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROUTERS_DIR, metavar="DIR")
    args = parser.parse_args(argv)
    prompts = demo_prompts(args.prompts)
    source = Source(("tiny", "small"), MAX_TOKENS)
    collected = source.collect(prompts, say)
    for router in args.router:
        say(f"{router}:")
        recipe = Recipe(steps=STEPS[router], batch=BATCH, rate=RATE, seed=args.seed)
        count = min(args.prompts, CITER_PROMPTS if router == "citer" else args.prompts)
        job = Job(router, Setting(recipe, say=say), SHAPE)
        trained = train(job, source, prompts[:count], collected.first(count))
        show(write(trained, args.out / router), args.out / router)


if __name__ == "__main__":
    main()
