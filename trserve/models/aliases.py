"""What a name given to ``--models`` stands for: an alias, a hub id in the local cache, or a path.

Reads directories only: no network, no torch, no hub client. The cache layout is the documented
one (``models--ORG--NAME/{refs,snapshots}``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trserve.errors import ModelUnavailableError
from trserve.models.spec import ModelSpec, read_json, read_spec, spec_from_config

HUB_ALIASES: Mapping[str, str] = {
    "0.6b": "Qwen/Qwen3-0.6B",
    "1.7b": "Qwen/Qwen3-1.7B",
    "4b": "Qwen/Qwen3-4B",
    "8b": "Qwen/Qwen3-8B",
    "14b": "Qwen/Qwen3-14B",
    "32b": "Qwen/Qwen3-32B",
}
"""Aliases of hub models; their configurations ship with the package, their weights do not."""

EMBEDDED = ("tiny", "small")
"""The pair whose weights ship with the package."""

ZERO_LAYER = "zero-layer"
"""Embedding, norm and head only: what is left of a step is the runtime's own cost."""

ALIASES = (*HUB_ALIASES, *EMBEDDED, ZERO_LAYER)

_CONFIG_DIR = Path(__file__).parent / "aliases"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_INSTEAD = "give the path of a checkpoint directory, or run the embedded pair: --models tiny,small"


@dataclass(frozen=True)
class ResolvedModel:
    """A model that can be loaded: what to call it, where it lies, what shape it has."""

    name: str
    path: Path
    spec: ModelSpec


def resolve_model(name: str) -> ResolvedModel:
    """The checkpoint that ``name`` stands for.

    Aliases win over directories of the same name: write ``./tiny`` for the latter.

    Raises:
        ModelUnavailableError: two lines: what is missing, and what can be run instead.
    """
    alias = name.lower()
    if alias in EMBEDDED:
        from trserve.demo import model_path

        return _checkpoint(alias, model_path("tiny" if alias == "tiny" else "small"))
    if alias in HUB_ALIASES:
        hub_id = HUB_ALIASES[alias]
        return _from_cache(alias, hub_id, f"model {alias!r} ({hub_id})")
    if alias == ZERO_LAYER:
        raise _unavailable(f"model {ZERO_LAYER!r} has no weights, only a configuration")
    path = Path(name).expanduser()
    if path.exists():
        return _checkpoint(path.resolve().name, path)
    if _HUB_ID.fullmatch(name):
        return _from_cache(name.partition("/")[2], name, f"model {name!r}")
    raise _unavailable(
        f"model {name!r} is neither an alias ({', '.join(ALIASES)}), nor a hub id (ORG/NAME), "
        "nor an existing path"
    )


def alias_spec(name: str) -> ModelSpec:
    """The shape of ``name`` without its weights, for dummy weights and emulated devices.

    Aliases of hub models and ``zero-layer`` need nothing on disk; any other name is resolved.
    """
    alias = name.lower()
    if alias not in HUB_ALIASES and alias != ZERO_LAYER:
        return resolve_model(name).spec
    file = _CONFIG_DIR / f"{alias}.json"
    return spec_from_config(read_json(file), {}, source=file.name)


def hub_cache() -> Path:
    """The local hub cache, by the environment variables that the hub's own client reads."""
    explicit = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if explicit:
        return Path(explicit).expanduser()
    home = os.environ.get("HF_HOME")
    if not home:
        home = str(Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface")
    return Path(home).expanduser() / "hub"


def _from_cache(name: str, hub_id: str, what: str) -> ResolvedModel:
    cache = hub_cache()
    snapshot = _snapshot(cache / f"models--{hub_id.replace('/', '--')}")
    if snapshot is None:
        raise _unavailable(f"{what} is not in the local cache ({cache}), and nothing is downloaded")
    return _checkpoint(name, snapshot)


def _snapshot(repository: Path) -> Path | None:
    """The directory of the branch ``main``, else of the newest snapshot that has a config."""
    head = repository / "refs" / "main"
    if head.is_file():
        snapshot = repository / "snapshots" / head.read_text().strip()
        if (snapshot / "config.json").is_file():
            return snapshot
    configs = list(repository.glob("snapshots/*/config.json"))
    if not configs:
        return None
    return max(configs, key=lambda config: config.parent.stat().st_mtime).parent


def _checkpoint(name: str, path: Path) -> ResolvedModel:
    if not path.is_dir():
        raise _unavailable(f"model {name!r} should be a checkpoint directory, but {path} is not")
    try:
        spec = read_spec(path)
        weight_files(path)
    except ModelUnavailableError as error:
        raise _unavailable(str(error)) from None
    return ResolvedModel(name, path, spec)


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a checkpoint directory, in name order.

    Raises:
        ModelUnavailableError: there are none, or a shard that the index names is missing.
    """
    index = path / "model.safetensors.index.json"
    if index.is_file():
        mapped = read_json(index).get("weight_map", {})
        shards = [path / shard for shard in sorted(set(mapped.values()))]
        missing = [shard.name for shard in shards if not shard.is_file()]
        if missing:
            raise ModelUnavailableError(
                f"{path} is incomplete: {len(missing)} of {len(shards)} weight files are missing "
                f"({missing[0]} is the first)"
            )
        if shards:
            return shards
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ModelUnavailableError(f"{path} has a config.json but no *.safetensors file")
    return files


def _unavailable(what: str) -> ModelUnavailableError:
    return ModelUnavailableError(f"{what}\n{_INSTEAD}")
