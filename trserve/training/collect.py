"""Both models at every prefix of the large one's answers, by running them through the engine.

The small model samples at each position, always hands over, and the large model writes: so the
rows of both stand side by side in the recording, at the price of one step each a token. Greedy:
the labels say what the large model would have written. Knows no networks.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from trserve import Engine, Recording, SamplingParams
from trserve.config import config_from_flags
from trserve.errors import ConfigError, RequestError
from trserve.offline.answers import Completion
from trserve.plan import ServerPlan, make_plan
from trserve.training.dataset import Dataset, dataset_of
from trserve.training.prompts import TrainingPrompt

CHUNK: Final = 2048
TOP_LOGITS: Final = 100
"""As many as R2R reads."""

Say = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class Collected:
    """The rows, and the large model's ``answers`` in the order of the prompts."""

    dataset: Dataset
    answers: Sequence[Completion]

    def first(self, prompts: int) -> Collected:
        """What belongs to the first so many ``prompts``."""
        return Collected(self.dataset.take(self.dataset.request < prompts), self.answers[:prompts])


class Source:
    """A pair of models, and how long its answers may be."""

    def __init__(self, models: Sequence[str], max_tokens: int, dtype: str = "auto") -> None:
        if len(models) != 2:
            raise ConfigError(f"--models {','.join(models)}: a router is trained for two models")
        self._settings: dict[str, Any] = {"models": tuple(models), "dtype": dtype}
        self._max_tokens = max_tokens
        self.plan: ServerPlan = make_plan(config_from_flags({**self._settings, "router": "none"}))

    @property
    def context(self) -> int:
        """Tokens that both models have positions for."""
        return min(model.max_model_len for model in self.plan.models)

    @property
    def num_logits(self) -> int:
        """How many of the largest logits are recorded."""
        return min(TOP_LOGITS, self.plan.tokenizer_size)

    def engine(self, router: str, config: dict[str, Any], **more: Any) -> Engine:
        """An engine of the pair; no worker waits for a batch, since all prompts are there."""
        own = {"router": router, "router_config": config, "batch_threshold": (1, 1)}
        return Engine(**self._settings, **own, **more)

    def collect(self, prompts: Sequence[TrainingPrompt], say: Say) -> Collected:
        """The rows of all ``prompts``."""
        with tempfile.TemporaryDirectory(prefix="trserve-training-") as directory:
            own = {"record": directory, "record_top_k": self.num_logits}
            with self.engine("random", {"p": 1}, **own) as engine:
                answers = self.answer(engine, [p.content for p in prompts], say)
            order = [str(answer.request_id) for answer in answers]
            return Collected(dataset_of(Recording(Path(directory)), order), answers)

    def answer(
        self, engine: Engine, prompts: Sequence[Any], say: Say, **options: Any
    ) -> list[Completion]:
        """Greedy answers to ``prompts``, in their order.

        Raises:
            ConfigError: one is refused, because it is longer than the models' context, say.
        """
        answers: list[Completion] = []
        for start in range(0, len(prompts), CHUNK):
            part = list(prompts[start : start + CHUNK])
            limits = [SamplingParams(max_tokens=self._limit(prompt)) for prompt in part]
            try:
                found = engine.generate(part, limits, temperature=0, **options)
            except RequestError as error:
                raise ConfigError(f"--prompts: {error}") from None
            answers += found if isinstance(found, list) else [found]
            say(f"{len(answers)} of {len(prompts)} prompts answered")
        return answers

    def _limit(self, prompt: Any) -> int:
        """Tokens that may follow; of ids it is known how many fit."""
        if isinstance(prompt[0], int):
            return min(self._max_tokens, self.context - len(prompt))
        return self._max_tokens
