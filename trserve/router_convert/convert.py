"""From the files of the routers' authors to safetensors with a JSON file beside it.

What is written is what the routers load, checked by the routers' own loaders first: every tensor by
name and shape, sizes inferred from tensors, no pickle that could run code. Knows no models.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from trserve.errors import ConfigError
from trserve.router_lib import co_llm, confidence, r2r
from trserve.router_lib.checkpoints import find_file, read_checkpoint, read_pickle
from trserve.router_lib.learned import as_threshold
from trserve.router_lib.r2r_network import EMBEDDING

FORMAT: Final = 1
SUFFIX: Final = ".safetensors"
_CITER_PATTERN: Final = "*.pth"
_MLP: Final = "mlp.0.weight"


@dataclass(frozen=True)
class Converted:
    """A router's tensors and what its JSON states; ``file`` is its name in a folder."""

    router: str
    file: str
    tensors: Mapping[str, torch.Tensor]
    facts: Mapping[str, Any]

    @property
    def threshold(self) -> float | None:
        """The one that it states."""
        found: float | None = self.facts["threshold"]
        return found

    @property
    def num_parameters(self) -> int:
        """Numbers in the tensors."""
        return sum(tensor.numel() for tensor in self.tensors.values())


def convert(source: Path, router: str | None, *, keep_embedding: bool = True) -> Converted:
    """The router in the file or folder ``source``.

    Args:
        router: whose layout it is; None: told from what is there. The layouts of ``citer`` and
            ``confidence`` are the same, and count as ``citer`` then.
        keep_embedding: whether an R2R file keeps the token embedding that it has; without it, the
            served small model's is used.

    Raises:
        ConfigError: it is none of these, does not fit, or needs an unrestricted pickle.
    """
    if not source.exists():
        raise ConfigError(f"convert-router {source}: there is no such file or folder")
    found = _READERS[router or _kind(source)](source)
    if router == "confidence":
        found = replace(found, router=router, file=confidence.FILES[1])
    if not keep_embedding:
        kept = {name: tensor for name, tensor in found.tensors.items() if name != EMBEDDING}
        found = replace(found, tensors=kept)
    return found


def write(found: Converted, out: Path, threshold: float | None = None) -> Path:
    """Write ``found`` to ``out``, a ``.safetensors`` file or a folder; returns the file.

    Args:
        threshold: stored instead of the one that ``found`` states.

    Raises:
        ConfigError: a file is there already, or cannot be written.
    """
    file = out if out.suffix == SUFFIX else out / found.file
    beside = file.with_suffix(".json")
    for each in (file, beside):
        if each.exists():
            raise ConfigError(f"convert-router: {each} is there already; nothing was written")
    stated = {"format": FORMAT, "router": found.router, **found.facts}
    if threshold is not None:
        stated["threshold"] = threshold
    tensors = {name: tensor.contiguous().clone() for name, tensor in found.tensors.items()}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # Whole or not at all: a file that is half written looks like a damaged checkpoint.
        save_file(tensors, temporary := file.with_suffix(".part"))
        beside.write_text(json.dumps(stated, indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, file)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"convert-router: cannot write {file}: {error}") from None
    return file


# -- which it is -----------------------------------------------------------------------------------


def _kind(source: Path) -> str:
    kind = _kind_of_folder(source) if source.is_dir() else _kind_of_file(source)
    if kind is None:
        raise ConfigError(
            f"convert-router {source}: neither an R2R file (a dict with model_type and "
            f"state_dict), nor CITER's (a state dict with {_MLP}), nor Co-LLM's (a model's folder "
            f"with the token {co_llm.DEFER}, or one vector); name its kind with --router"
        )
    return kind


def _kind_of_folder(folder: Path) -> str | None:
    if any((folder / name).is_file() for name in r2r.FILES):
        return "r2r"
    if (folder / co_llm.FILE).is_file() or _names_deferral(folder):
        return "co-llm"
    mlps = [*folder.glob(_CITER_PATTERN), *(folder / name for name in confidence.FILES)]
    return "citer" if any(file.is_file() for file in mlps) else None


def _names_deferral(folder: Path) -> bool:
    files = (folder / "tokenizer.json", folder / "added_tokens.json")
    return any(
        co_llm.DEFER in file.read_text(encoding="utf-8", errors="replace")
        for file in files
        if file.is_file()
    )


def _kind_of_file(file: Path) -> str | None:
    content: Any
    if file.suffix == SUFFIX:
        checkpoint = read_checkpoint(file)
        names: Any = checkpoint.names
        if "model_type" in checkpoint.facts:
            return "r2r"
        if len(names) == 1:
            return "co-llm"
        return "citer" if _MLP in names else None
    content = read_pickle(file)
    if isinstance(content, torch.Tensor):
        return "co-llm"
    if not isinstance(content, Mapping):
        return None
    if "state_dict" in content:
        return "r2r"
    return "citer" if _MLP in content else None


# -- reading each kind -----------------------------------------------------------------------------


def _from_r2r(source: Path) -> Converted:
    checkpoint = read_checkpoint(find_file(source, r2r.FILES), state_dict="state_dict")
    # The embedding is the served model's, or kept as it is; for the sizes any will do.
    network = r2r.read_network(checkpoint, lambda hidden: torch.zeros(1, hidden))
    common = r2r.stated(checkpoint, "common_args")
    facts = {
        "model_type": r2r.class_of(checkpoint),
        "init_args": _plain(r2r.stated(checkpoint, "init_args")),
        "threshold": r2r.stored_threshold(checkpoint),
        "input_type": _plain(common.get("input_type", checkpoint.facts.get("input_type"))),
        "hidden_size": network.hidden_size,
        "num_logits": network.num_logits,
    }
    return Converted("r2r", r2r.FILES[0], checkpoint.tensors, facts)


def _from_citer(source: Path) -> Converted:
    checkpoint = read_checkpoint(_citer_file(source))
    network = confidence.ConfidenceNetwork(checkpoint)
    facts = {
        "hidden_size": network.hidden_size,
        "threshold": as_threshold(checkpoint, checkpoint.facts.get("threshold")),
    }
    return Converted("citer", confidence.FILES[0], network.tensors, facts)


def _citer_file(source: Path) -> Path:
    files = sorted(source.glob(_CITER_PATTERN)) if source.is_dir() else []
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:8])
        raise ConfigError(f"convert-router {source}: holds several: {names}; name one of them")
    return files[0] if files else find_file(source, confidence.FILES)


def _from_co_llm(source: Path) -> Converted:
    found = co_llm.read_deferral(source)
    facts = {
        "hidden_size": len(found.vector),
        "threshold": as_threshold(found.checkpoint, found.checkpoint.facts.get("threshold")),
        co_llm.TOKEN_ID: found.token_id,
    }
    return Converted("co-llm", co_llm.FILE, {"deferral": found.vector}, facts)


_READERS: Final[dict[str, Callable[[Path], Converted]]] = {
    "r2r": _from_r2r,
    "citer": _from_citer,
    "confidence": _from_citer,
    "co-llm": _from_co_llm,
}


def _plain(value: Any) -> Any:
    """``value`` as JSON can have it; what it cannot, a dtype say, by its name."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)
