"""Whether the models of a server speak of the same tokens, found out before anything is loaded.

Ids cross from model to model as they are, and are those of the first model. Knows tokenizers and
which models there are; no weights, and nothing of plans.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from trserve.errors import ConfigError
from trserve.gateway.tokenizer import Tokenizer
from trserve.models.aliases import ResolvedModel
from trserve.models.token_map import MapError, TokenMap, token_map

log = logging.getLogger(__name__)


def token_maps(tokenizer: Tokenizer, models: Sequence[ResolvedModel]) -> list[TokenMap]:
    """How each model is put in the ids of ``tokenizer``, the first one's: mostly, as it is.

    Raises:
        ConfigError: a model has other tokens than the first, or fewer rows than there are ids.
    """
    first = models[0]
    for model in models:
        if model.spec.vocab_size < tokenizer.size:
            raise ConfigError(
                f"--models: {model.name} has {model.spec.vocab_size} vocabulary rows, fewer than "
                f"the {tokenizer.size} ids of the tokenizer"
            )
    return [_map_of(tokenizer, first, model) for model in models]


def end_ids(
    tokenizer: Tokenizer, models: Sequence[ResolvedModel], maps: Sequence[TokenMap]
) -> list[int]:
    """Every id of ``tokenizer`` that ends a text, sorted: its own, and what any model calls so.

    Ids beyond the tokenizer's are never drawn, and not every model has a row for them: a model
    that ends with one is warned of and ends with the others.
    """
    found = {token for token in tokenizer.eos_token_ids if token < tokenizer.size}
    for model, mapping in zip(models, maps, strict=True):
        ids = mapping.to_server(model.spec.eos_token_ids)
        found.update(token for token in ids if token < tokenizer.size)
        if beyond := [token for token in ids if token >= tokenizer.size]:
            log.warning(
                "%s: eos_token_id in its config.json or generation_config.json is %s, but the "
                "tokenizer has %d ids: that is never drawn, and ends no answer",
                model.name,
                ", ".join(map(str, beyond)),
                tokenizer.size,
            )
    return sorted(found)


def _map_of(tokenizer: Tokenizer, first: ResolvedModel, other: ResolvedModel) -> TokenMap:
    if _same_file(first.tokenizer_path, other.tokenizer_path):
        return TokenMap()
    theirs = Tokenizer.load(other.tokenizer_path)
    if theirs.fingerprint() == tokenizer.fingerprint():
        return TokenMap()
    try:
        found = token_map(tokenizer, theirs)
    except MapError as error:
        raise ConfigError(
            f"--models: {first.name} and {other.name} have different tokenizers, of which only "
            f"special tokens may differ in their ids: in {other.name}, {error}"
        ) from None
    rows = other.spec.vocab_size
    if beyond := [row for _, row in found.moved if row >= rows]:
        raise ConfigError(
            f"--models: {other.name} has {rows} vocabulary rows, but its tokenizer has a token "
            f"that {first.name} has, too, at id {max(beyond)}: give it the tokenizer that its "
            "weights were trained with"
        )
    names = first.name, other.name, len(found.moved)
    log.info("%s and %s: the same tokens; %d rows are put in the first one's order", *names)
    return found


def _same_file(first: Path, second: Path) -> bool:
    if first == second:
        return True
    ours, theirs = first / "tokenizer.json", second / "tokenizer.json"
    return ours.exists() and theirs.exists() and ours.read_bytes() == theirs.read_bytes()
