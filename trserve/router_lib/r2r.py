"""R2R (arXiv 2505.21600): a network predicts which of the small model's tokens lead elsewhere.

After each of the first model's steps p = sigmoid(f(h, e(y), z)); where p is at least the threshold
the sampled token y is replaced by one of the other model's. See ``r2r_network`` for f.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from trserve.router_lib.checkpoints import Checkpoint, find_file, read_checkpoint
from trserve.router_lib.learned import (
    LearnedRouter,
    Network,
    as_threshold,
    check_embedding,
)
from trserve.router_lib.parameters import Parameter
from trserve.router_lib.r2r_network import CLASSES, EMBEDDING, Embedding, R2RNetwork
from trserve.router_lib.registry import R2R_PARAMETERS

FILES: Final = tuple(
    f"{name}.{ending}"
    for ending in ("safetensors", "pt")
    for name in ("default_router", "router", "default_router_sampling")
)


class R2R(LearnedRouter):
    """To the other model where the network's probability is at least ``threshold``."""

    parameters: tuple[Parameter, ...] = R2R_PARAMETERS
    above = True
    inclusive = True
    capturable = True

    def load(self) -> Network:
        """The network of the named file; the threshold too, unless one was given."""
        file = find_file(self.checkpoint, FILES)
        checkpoint = read_checkpoint(file, state_dict="state_dict")
        size = self.context.tokenizer_size
        network = read_network(checkpoint, lambda hidden: self._embedding(checkpoint, hidden))
        if network.hidden_size is not None:
            self.check_hidden_size(network.hidden_size)
        if network.num_logits > size:
            raise checkpoint.error(
                f"reads the {network.num_logits} largest logits; the tokenizer has {size} ids"
            )
        self.take_threshold(checkpoint, stored_threshold(checkpoint))
        self._classifier = network
        return lambda result: network(result, size)

    def to(self, device: torch.device) -> None:
        """The network and the embedding that it reads."""
        if self.model == 0:
            self._classifier.to(device)

    def _embedding(self, checkpoint: Checkpoint, hidden: int) -> torch.Tensor:
        self.check_hidden_size(hidden)
        size = self.context.tokenizer_size
        if EMBEDDING not in checkpoint:
            return self.token_embedding(size, hidden)
        found = checkpoint.take(EMBEDDING, *checkpoint.shape(EMBEDDING, 2))
        return check_embedding(found, size, hidden, str(checkpoint.path))


def read_network(checkpoint: Checkpoint, embedding: Embedding) -> R2RNetwork:
    """The network of ``checkpoint``. Raises ConfigError where its class or a tensor is unknown."""
    return R2RNetwork(
        checkpoint,
        class_of(checkpoint),
        normalize=bool(stated(checkpoint, "init_args").get("normalize_input", False)),
        embedding=embedding,
    )


def class_of(checkpoint: Checkpoint) -> str:
    """Which of R2R's classes it is. ConfigError for one that is not known."""
    name = checkpoint.facts.get("model_type")
    if name not in CLASSES:
        raise checkpoint.error(
            f"its model_type is {name!r}; of R2R's classes these are known: {', '.join(CLASSES)}"
        )
    return str(name)


def stored_threshold(checkpoint: Checkpoint) -> float | None:
    """The threshold that the file states, if it does."""
    # The official file keeps it one level down; the JSON beside a safetensors file does not.
    common = stated(checkpoint, "common_args")
    return as_threshold(checkpoint, common.get("threshold", checkpoint.facts.get("threshold")))


def stated(checkpoint: Checkpoint, name: str) -> Mapping[str, Any]:
    """The dict ``name`` of what it states, empty where there is none."""
    found = checkpoint.facts.get(name) or {}
    if not isinstance(found, Mapping):
        raise checkpoint.error(f"its {name} is no dict")
    return found
