"""``trserve edge``: the settings of a server whose small model is here and whose large one is not.

Knows what is another default than for ``launch``, and why; launching is ``launch``'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from trserve import demo
from trserve.config_sources import DEFAULT, Settings
from trserve.edge.greeting import UNNAMED
from trserve.edge.onnx.files import is_onnx_model, read_manifest
from trserve.edge.onnx.placement import check_exportable, check_packages
from trserve.edge.onnx.stored import stored_path
from trserve.edge.openai_setup import check_router
from trserve.edge.options import DEFAULTS
from trserve.errors import ConfigError
from trserve.models.aliases import ResolvedModel, resolve_model
from trserve.places import OPENAI, Place, split_place
from trserve.record_format import weights_digest

_CHECKPOINT: Final = "checkpoint"
_WITHOUT_CHECKPOINT: Final = "entropy"
_EMBEDDED_PEER: Final = "small"
_ORIGIN: Final = "trserve edge"


def edge_settings(model: str, cloud: str, settings: Settings) -> tuple[Settings, list[str]]:
    """What a launch is told, and what a person is.

    Args:
        model: the small model, as ``--models`` takes it.
        cloud: ``HOST:PORT`` or ``openai:URL``, with ``NAME@`` before it or not.
        settings: what flags, environment and file say; of models they say nothing here.

    Raises:
        ConfigError: ``cloud`` is no address, or what it needs is missing.
        ModelUnavailableError: the model is not here, cannot be run, or a package is missing.
    """
    values = settings.values
    found = resolve_model(model, values.get("load_format", "auto"))
    place = place_of(cloud, found)
    own = {**DEFAULTS, "models": (model, f"{place.name}@{place.remote}")}
    own["max_model_len"] = min(DEFAULTS["max_model_len"], found.spec.max_position_embeddings)
    notes: list[str] = []
    router = values.get("router", DEFAULTS["router"])
    if router == DEFAULTS["router"]:
        own |= _router(found, place, values, notes)
    merged = {**own, **{name: value for name, value in values.items() if name != "models"}}
    if own.get("router_config") and router == DEFAULTS["router"]:
        merged["router_config"] = own["router_config"]
    _check(place, merged)
    if merged["device"] == "onnx":
        _check_onnx(found, merged, notes)
    origins = {name: _ORIGIN for name in own if settings.origins[name] == DEFAULT}
    return replace(settings, values=merged, origins={**settings.origins, **origins}), notes


def place_of(cloud: str, model: ResolvedModel) -> Place:
    """Where the large model is, and what to call it. ConfigError for what is no address."""
    named = f"@{OPENAI}" in cloud or (not cloud.startswith(OPENAI) and "@" in cloud)
    name = _EMBEDDED_PEER if _is_embedded(model) else UNNAMED
    try:
        place = split_place(cloud if named else f"{name}@{cloud}")
    except ConfigError:
        place = Place(cloud)
    if not place.remote or place.is_placeholder:
        raise ConfigError(
            f"--cloud {cloud}: write HOST:PORT or openai:http://HOST:PORT/v1, with NAME@ before it "
            "or not"
        )
    return place


def _is_embedded(model: ResolvedModel) -> bool:
    """Whether it is the embedded pair's small model, or an export of it."""
    tiny = demo.model_path("tiny")
    if is_onnx_model(model.path):
        return read_manifest(model.path).source == weights_digest(tiny)
    return model.path == tiny


def _router(
    model: ResolvedModel, place: Place, values: Mapping[str, Any], notes: list[str]
) -> dict[str, Any]:
    """The default router: by confidence if there is a checkpoint, else by entropy."""
    pairs: tuple[tuple[str, str], ...] = values.get("router_config", ())
    if any(name == _CHECKPOINT for name, _ in pairs):
        return {}
    stored = demo.router_checkpoint(DEFAULTS["router"])
    if _is_embedded(model) and place.name == _EMBEDDED_PEER and stored is not None:
        return {"router_config": ((_CHECKPOINT, str(stored)), *pairs)}
    if "router" in values:
        raise ConfigError(
            f"--router confidence: {model.name} ships without a trained router; give "
            "--router-config checkpoint=FILE (`trserve train-router` makes one), or --router "
            f"{_WITHOUT_CHECKPOINT}"
        )
    notes.append(
        f"routing by {_WITHOUT_CHECKPOINT}, as no trained router was named; `trserve train-router` "
        "makes one for --router-config checkpoint=FILE"
    )
    return {"router": _WITHOUT_CHECKPOINT}


def _check(place: Place, merged: Mapping[str, Any]) -> None:
    if place.remote.startswith(OPENAI):
        check_router(merged["router"])
    elif not merged.get("edge_keys"):
        raise ConfigError(
            f"--keys: a link to {place.remote} needs a key file; `trserve keys edge SERVER_FILE "
            "CLIENT_FILE` makes one for each side"
        )


def _check_onnx(model: ResolvedModel, merged: Mapping[str, Any], notes: list[str]) -> None:
    """Say what is missing before anything is reached, and where the model will be exported to."""
    if is_onnx_model(model.path):
        check_packages("trserve edge", ("onnxruntime",))
        return
    check_packages("trserve edge")
    check_exportable(model.spec, model.name)
    int8 = merged.get("quantization") == "int8"
    target = stored_path(model, int8=int8, load_format=merged.get("load_format", "auto"))
    if not is_onnx_model(target):
        notes.append(f"{model.name} is exported for ONNX Runtime, once, to {target}")
