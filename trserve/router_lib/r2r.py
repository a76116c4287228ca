"""R2R (arXiv 2505.21600): a network predicts which of the small model's tokens lead elsewhere.

After each of the first model's steps p = sigmoid(f(h, e(y), z)); where p is at least the threshold
the sampled token y is replaced by one of the other model's. See ``r2r_network`` for f.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import msgspec
import torch

from trserve.router_lib.checkpoints import Checkpoint, find_file, read_checkpoint
from trserve.router_lib.learned import (
    LearnedRouter,
    Network,
    check_embedding,
    read_token_embedding,
)
from trserve.router_lib.parameters import Parameter
from trserve.router_lib.r2r_network import CLASSES, EMBEDDING, R2RNetwork
from trserve.router_lib.registry import FROM_CHECKPOINT, R2R_PARAMETERS

log = logging.getLogger(__name__)

_FILES: Final = tuple(
    f"{name}.{ending}"
    for ending in ("safetensors", "pt")
    for name in ("default_router", "router", "default_router_sampling")
)


class R2R(LearnedRouter):
    """To the other model where the network's probability is at least ``threshold``."""

    parameters: tuple[Parameter, ...] = R2R_PARAMETERS
    above = True
    inclusive = True

    def load(self) -> Network:
        """The network of the named file; the threshold too, unless one was given."""
        file = find_file(self.checkpoint, _FILES)
        checkpoint = read_checkpoint(file, state_dict="state_dict")
        size = self.context.tokenizer_size
        network = R2RNetwork(
            checkpoint,
            _class_of(checkpoint),
            normalize=bool(_stated(checkpoint, "init_args").get("normalize_input", False)),
            embedding=lambda hidden: self._embedding(checkpoint, hidden),
        )
        if network.hidden_size is not None:
            self.check_hidden_size(network.hidden_size)
        if network.num_logits > size:
            raise checkpoint.error(
                f"reads the {network.num_logits} largest logits; the tokenizer has {size} ids"
            )
        self._take_threshold(checkpoint)
        return lambda result: network(result, size)

    def _embedding(self, checkpoint: Checkpoint, hidden: int) -> torch.Tensor:
        self.check_hidden_size(hidden)
        size = self.context.tokenizer_size
        if EMBEDDING not in checkpoint:
            return read_token_embedding(self.model_path, size, hidden)
        found = checkpoint.take(EMBEDDING, *checkpoint.shape(EMBEDDING, 2))
        return check_embedding(found, size, hidden, str(checkpoint.path))

    def _take_threshold(self, checkpoint: Checkpoint) -> None:
        given, stored = self.context.config["threshold"], _stored_threshold(checkpoint)
        if given == FROM_CHECKPOINT:
            if stored is None:
                raise checkpoint.error("states no threshold: give --router-config threshold=...")
            values = {**self.context.config, "threshold": stored}
            self.context = replace(self.context, config=values)
            first, *others = self.parameters
            self.parameters = (msgspec.structs.replace(first, default=stored), *others)
            log.info("r2r: threshold %g, as %s states it", stored, checkpoint.path)
        elif stored is not None and given != stored:
            log.warning("r2r: threshold %g overrides %g of %s", given, stored, checkpoint.path)


def _class_of(checkpoint: Checkpoint) -> str:
    name = checkpoint.facts.get("model_type")
    if name not in CLASSES:
        raise checkpoint.error(
            f"its model_type is {name!r}; of R2R's classes these are known: {', '.join(CLASSES)}"
        )
    return str(name)


def _stored_threshold(checkpoint: Checkpoint) -> float | None:
    # The official file keeps it one level down; the JSON beside a safetensors file does not.
    common = _stated(checkpoint, "common_args")
    found = common.get("threshold", checkpoint.facts.get("threshold"))
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 <= found <= 1:
        raise checkpoint.error(f"its threshold is {found!r}, expected a number from 0 to 1")
    return float(found)


def _stated(checkpoint: Checkpoint, name: str) -> Mapping[str, Any]:
    found = checkpoint.facts.get(name) or {}
    if not isinstance(found, Mapping):
        raise checkpoint.error(f"its {name} is no dict")
    return found
