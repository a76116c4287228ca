"""What the learned routers share: a network in the first model's worker, and what it is made for.

Their signal is one probability per row. Knows no architecture.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Final

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from trserve.errors import ConfigError, ModelUnavailableError
from trserve.models.aliases import weight_files
from trserve.models.spec import read_spec
from trserve.router_lib.base import RouterContext, StepResult
from trserve.router_lib.checkpoints import Checkpoint
from trserve.router_lib.registry import FROM_CHECKPOINT, MODEL
from trserve.router_lib.threshold import ThresholdRouter

log = logging.getLogger(__name__)
_EMBEDDING = "model.embed_tokens.weight"
_FLAG: Final = f"--router-config {MODEL}="
_INSTEAD: Final = "name a folder that has it, or a checkpoint with token_embeddings.weight"

Network = Callable[[StepResult], torch.Tensor]
"""From a step's result to float32 [B] in 0 to 1."""


class LearnedRouter(ThresholdRouter):
    """Subclasses define ``load``; parameters include ``checkpoint`` and ``model``.

    ``usual``: the published threshold, for checkpoints that state none; None: they must.
    """

    usual: ClassVar[float | None] = None

    def __init__(self, context: RouterContext) -> None:
        super().__init__(context)
        # The other models only return what they are given.
        self._network = self.load() if self.model == 0 else None

    @abstractmethod
    def load(self) -> Network:
        """The network of the checkpoint. Raises ConfigError if it does not fit."""

    def signal(self, result: StepResult) -> torch.Tensor:
        """What the network says."""
        assert self._network is not None
        return self._network(result)

    @property
    def checkpoint(self) -> Path:
        """The file or folder that was named."""
        return Path(self.context.config["checkpoint"]).expanduser()

    @property
    def model_path(self) -> Path:
        """Where the first model lies."""
        return Path(self.context.config[MODEL]).expanduser()

    def token_embedding(self, size: int, hidden: int) -> torch.Tensor:
        """The input embedding [V, hidden] of the first model, V at least ``size``.

        The loaded model's own, however its weights came about; read from a file where another
        model was named. Raises ConfigError where there is none, or of another shape.
        """
        own = self.context.embedding
        if own is not None and str(self.model_path) == self.context.path:
            return check_embedding(own, size, hidden, self.context.path)
        return read_token_embedding(self.model_path, size, hidden)

    def take_threshold(self, checkpoint: Checkpoint, stored: float | None) -> None:
        """Use the threshold that was given, else the ``stored`` one, else the usual one.

        Raises ConfigError where there is none of them.
        """
        name = self.parameters[0].name
        given = self.context.config.get(name, FROM_CHECKPOINT)
        if given != FROM_CHECKPOINT:
            if stored is not None and given != stored:
                log.warning(
                    "%s: %s %g overrides %g of %s",
                    type(self).__name__.lower(),
                    name,
                    given,
                    stored,
                    checkpoint.path,
                )
            self._make_default(float(given))
            return
        chosen = self.usual if stored is None else stored
        if chosen is None:
            raise checkpoint.error(f"states no threshold: give --router-config {name}=...")
        self.context = replace(self.context, config={**self.context.config, name: chosen})
        self._make_default(chosen)
        if stored is not None:
            found = type(self).__name__.lower(), name, stored, checkpoint.path
            log.info("%s: %s %g, as %s states it", *found)

    def _make_default(self, threshold: float) -> None:
        # A parameter's default is the one number out of its bounds that a request may send.
        first, *others = self.parameters
        self.parameters = (msgspec.structs.replace(first, default=threshold), *others)

    def check_hidden_size(self, size: int) -> None:
        """ConfigError unless the first model's hidden states have ``size`` numbers."""
        own = read_spec(self.model_path).hidden_size
        if size != own:
            raise ConfigError(
                f"checkpoint {self.checkpoint}: made for hidden states of size {size}, but "
                f"{self.context.models[0]} ({self.model_path}) has {own}; it belongs to another "
                "model"
            )


def as_threshold(checkpoint: Checkpoint, found: object) -> float | None:
    """A stated threshold, which may be None. ConfigError unless it is a number from 0 to 1."""
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 <= found <= 1:
        raise checkpoint.error(f"its threshold is {found!r}, expected a number from 0 to 1")
    return float(found)


def read_token_embedding(
    path: Path, size: int, hidden: int, *, flag: str = _FLAG, instead: str = _INSTEAD
) -> torch.Tensor:
    """The input embedding [V, hidden] of the model in the folder ``path``, V at least ``size``.

    The file is mapped, and shares its memory with whoever else has it mapped.

    Args:
        flag: what stands before ``path`` where it was named.
        instead: what to do where it has no embedding.

    Raises:
        ConfigError: there is none, or it has another shape.
    """
    try:
        for file in weight_files(path) if path.is_dir() else ():
            with safe_open(file, framework="pt", device="cpu") as opened:
                if _EMBEDDING in opened.keys():  # noqa: SIM118 (not a mapping)
                    found: torch.Tensor = opened.get_tensor(_EMBEDDING)
                    return check_embedding(found, size, hidden, str(file))
    except (ModelUnavailableError, OSError, SafetensorError) as error:
        raise ConfigError(f"{flag}{path}: {error}") from None
    raise ConfigError(
        f"{flag}{path}: no safetensors file there holds {_EMBEDDING}, which this router needs; "
        f"{instead}"
    )


def check_embedding(found: torch.Tensor, size: int, hidden: int, source: str) -> torch.Tensor:
    """``found`` itself. ConfigError unless it is [V, hidden] with V at least ``size``."""
    shape = list(found.shape)
    if len(shape) != 2 or shape[1] != hidden or shape[0] < size:
        raise ConfigError(
            f"{source}: the token embedding has the shape {shape}, expected [at least {size}, "
            f"{hidden}]"
        )
    return found
