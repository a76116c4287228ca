"""What a name given to ``--models`` stands for: an alias, a hub id in the local cache, or a path.

Reads directories and headers only: no network, no torch, no hub client. The cache layout is the
documented one (``models--ORG--NAME/{refs,snapshots}``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from trserve import demo
from trserve.edge.onnx.files import is_onnx_model
from trserve.errors import ModelUnavailableError
from trserve.models.spec import ModelSpec, read_json, read_spec

LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]
"""Where weights come from: ``auto`` takes what is there, ``dummy`` draws them at random."""

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
    """A model that can be loaded.

    Attributes:
        name: what to call it.
        path: what ``read_spec`` and ``load_model`` take: a checkpoint directory, a GGUF file, or
            the configuration that stands for an alias with dummy weights.
        spec: its shape; without ids that end a text where the tokenizer is not the model's own.
        tokenizer_path: the directory of its ``tokenizer.json``, or the GGUF file that has it.
        own_tokenizer: False where there is none, and the embedded pair's takes its place.
    """

    name: str
    path: Path
    spec: ModelSpec
    tokenizer_path: Path
    own_tokenizer: bool = True


def resolve_model(name: str, load_format: LoadFormat = "auto") -> ResolvedModel:
    """The checkpoint that ``name`` stands for; with dummy weights, its configuration will do.

    Aliases win over directories of the same name: write ``./tiny`` for the latter.

    Raises:
        ModelUnavailableError: two lines: what is missing, and what can be run instead.
    """
    alias = name.lower()
    if alias in EMBEDDED:
        path = demo.model_path("tiny" if alias == "tiny" else "small")
        return _checkpoint(alias, path, load_format)
    if alias in HUB_ALIASES:
        hub_id = HUB_ALIASES[alias]
        if load_format == "dummy" and _cached(hub_id) is None:
            return _configuration(alias)
        return _from_cache(alias, hub_id, f"model {alias!r} ({hub_id})", load_format)
    if alias == ZERO_LAYER:
        if load_format == "dummy":
            return _configuration(alias)
        raise _unavailable(
            f"model {ZERO_LAYER!r} has no weights, only a configuration",
            "draw them with --load-format dummy, or run the embedded pair: --models tiny,small",
        )
    path = Path(name).expanduser()
    if path.exists():
        return _checkpoint(path.resolve().name.removesuffix(".gguf"), path, load_format)
    if _HUB_ID.fullmatch(name):
        return _from_cache(name.partition("/")[2], name, f"model {name!r}", load_format)
    raise _unavailable(
        f"model {name!r} is neither an alias ({', '.join(ALIASES)}), nor a hub id (ORG/NAME), "
        "nor an existing path"
    )


def resolve_tokenizer(name: str) -> Path:
    """Where the tokenizer of ``name`` lies: a path, an alias or a hub id, whose weights none needs.

    Raises:
        ModelUnavailableError: there is none.
    """
    path = Path(name).expanduser()
    if name.lower() in EMBEDDED:
        path = demo.model_path("tiny" if name.lower() == "tiny" else "small")
    elif not path.exists():
        hub_id = HUB_ALIASES.get(name.lower(), name)
        path = (_cached(hub_id) if _HUB_ID.fullmatch(hub_id) else None) or path
    found = _tokenizer_path(path) if path.exists() else None
    if found is None:
        raise _unavailable(
            f"--tokenizer {name}: there is no tokenizer.json",
            "give the path of a checkpoint directory, a GGUF file, or a hub id in the local cache",
        )
    return found


def alias_spec(alias: str) -> ModelSpec:
    """The shape of a hub alias or of ``zero-layer``, from the configuration that ships with it."""
    return read_spec(_CONFIG_DIR / f"{alias}.json")


def hub_cache() -> Path:
    """The local hub cache, by the environment variables that the hub's own client reads."""
    explicit = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if explicit:
        return Path(explicit).expanduser()
    home = os.environ.get("HF_HOME")
    if not home:
        home = str(Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface")
    return Path(home).expanduser() / "hub"


def _from_cache(name: str, hub_id: str, what: str, load_format: LoadFormat) -> ResolvedModel:
    snapshot = _cached(hub_id)
    if snapshot is None:
        raise _unavailable(
            f"{what} is not in the local cache ({hub_cache()}), and nothing is downloaded"
        )
    return _checkpoint(name, snapshot, load_format)


def _cached(hub_id: str) -> Path | None:
    return _snapshot(hub_cache() / f"models--{hub_id.replace('/', '--')}")


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


def _configuration(alias: str) -> ResolvedModel:
    """An alias of which only the configuration is here, for dummy weights."""
    return _with_embedded_tokenizer(alias, _CONFIG_DIR / f"{alias}.json")


def _with_embedded_tokenizer(name: str, path: Path) -> ResolvedModel:
    # The model's own ids mean other texts in another vocabulary.
    spec = replace(read_spec(path), eos_token_ids=())
    return ResolvedModel(name, path, spec, demo.model_path("tiny"), own_tokenizer=False)


def _checkpoint(name: str, path: Path, load_format: LoadFormat) -> ResolvedModel:
    try:
        path = _located(name, path, load_format)
        tokenizer = _tokenizer_path(path)
        if tokenizer is None and load_format == "dummy":
            return _with_embedded_tokenizer(name, path)
        spec = read_spec(path)
        if path.is_dir() and load_format != "dummy" and not is_onnx_model(path):
            weight_files(path)
        return ResolvedModel(name, path, spec, tokenizer or path)
    except ModelUnavailableError as error:
        raise _unavailable(str(error)) from None


def _located(name: str, path: Path, load_format: LoadFormat) -> Path:
    """``path`` itself, or the GGUF file in it that is meant."""
    if path.is_file() and path.suffix == ".gguf":
        if load_format == "safetensors":
            raise ModelUnavailableError(f"--load-format safetensors, but {path} is a GGUF file")
        return path
    if not path.is_dir():
        raise ModelUnavailableError(
            f"model {name!r} should be a checkpoint directory or a *.gguf file, but {path} is not"
        )
    return _only(sorted(path.glob("*.gguf")), path) if _means_gguf(path, load_format) else path


def _means_gguf(directory: Path, load_format: LoadFormat) -> bool:
    if load_format in ("gguf", "safetensors"):
        return load_format == "gguf"
    if load_format == "dummy" and (directory / "config.json").is_file():
        return False
    return any(directory.glob("*.gguf")) and not any(directory.glob("*.safetensors"))


def _only(files: list[Path], directory: Path) -> Path:
    if len(files) == 1:
        return files[0]
    found = ", ".join(file.name for file in files) or "none"
    raise ModelUnavailableError(
        f"{directory} should hold exactly one *.gguf file, but holds {found}; name the file itself"
    )


def _tokenizer_path(path: Path) -> Path | None:
    """Where the tokenizer of ``path`` lies; in a GGUF file unless there is one beside it."""
    directory = path.parent if path.suffix == ".gguf" else path
    if (directory / "tokenizer.json").is_file():
        return directory
    return path if path.suffix == ".gguf" else None


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a checkpoint directory, in name order.

    Raises:
        ModelUnavailableError: there are none, or a shard that the index names is missing.
    """
    index = path / "model.safetensors.index.json"
    if index.is_file():
        shards = [path / shard for shard in _shard_names(index)]
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


def _shard_names(index: Path) -> list[str]:
    mapped = read_json(index).get("weight_map", {})
    if not isinstance(mapped, dict) or not all(isinstance(name, str) for name in mapped.values()):
        raise ModelUnavailableError(
            f"{index}: weight_map should name a file for each tensor, as an object of texts; the "
            "file is damaged"
        )
    return sorted(set(mapped.values()))


def _unavailable(what: str, instead: str = _INSTEAD) -> ModelUnavailableError:
    return ModelUnavailableError(f"{what}\n{instead}")
