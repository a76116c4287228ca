"""What ``--device onnx`` means for a plan: rows instead of blocks, float32, and which models go.

Knows configurations and shapes; imports neither torch nor the runtime.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from trserve.config import LaunchConfig
from trserve.edge.onnx.files import PIP, is_onnx_model, read_manifest
from trserve.errors import ConfigError, ModelUnavailableError
from trserve.models.aliases import ResolvedModel
from trserve.models.spec import ModelSpec

_HEAD_MULTIPLE: Final = 16
"""The runtime's attention rotates heads of a multiple of 16 numbers."""
_DTYPES: Final = ("auto", "float32")
_PACKAGES: Final = ("onnxruntime", "onnx")


def check_packages(need: str, packages: Sequence[str] = _PACKAGES) -> None:
    """ModelUnavailableError, which says what needs it, where one of ``packages`` is missing."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelUnavailableError(
            f"{need} needs the package{'s'[: len(missing) - 1]} {' and '.join(missing)}\n{PIP}"
        )


def check_exportable(spec: ModelSpec, name: str) -> None:
    """ModelUnavailableError where no graph can say what the model ``name`` computes."""
    reasons = {
        "is a mixture of experts": spec.experts is not None,
        "has no layers": not spec.num_layers,
        f"has heads of {spec.head_dim} numbers": bool(spec.head_dim % _HEAD_MULTIPLE),
    }
    for reason, found in reasons.items():
        if found:
            raise ModelUnavailableError(
                f"{name} {reason}: only dense models whose heads have a multiple of "
                f"{_HEAD_MULTIPLE} numbers run on ONNX Runtime; use --device cpu"
            )


def as_rows(config: LaunchConfig, models: Sequence[ResolvedModel]) -> LaunchConfig:
    """``config`` with one KV block a row, and nothing that blocks or torch make possible.

    A row's keys and values are one buffer to the runtime, in which a step appends. So a request
    holds a row's worth of (untouched) memory, and no prefix is shared.

    Raises:
        ConfigError: a flag asks for what the runtime does not do.
        ModelUnavailableError: a package is missing, or a model cannot be run.
    """
    if config.model.dtype not in _DTYPES:
        raise ConfigError(
            f"--dtype {config.model.dtype}: ONNX Runtime computes in float32 here; for less memory "
            "give --quantization int8"
        )
    packages = _PACKAGES if any(not is_onnx_model(m.path) for m in models) else _PACKAGES[:1]
    check_packages("--device onnx", packages)
    for model in models:
        check_exportable(model.spec, model.name)
    length = max(config.model.max_model_len or longest_row(model) for model in models)
    return replace(
        config,
        model=replace(config.model, dtype="float32"),
        engine=replace(config.engine, block_size=length, enable_prefix_caching=False),
    )


def without_exports(config: LaunchConfig, models: Sequence[ResolvedModel]) -> LaunchConfig:
    """``config`` for another device. ModelUnavailableError where a model is for this one alone."""
    for model in models:
        if is_onnx_model(model.path):
            raise ModelUnavailableError(
                f"{model.path} is an export for ONNX Runtime, which only --device onnx runs; add "
                "that, or name the model that it was made from"
            )
    return config


def longest_row(model: ResolvedModel) -> int:
    """Positions of ``model``, or of what was exported of it."""
    most = model.spec.max_position_embeddings
    return min(most, read_manifest(model.path).positions) if is_onnx_model(model.path) else most
