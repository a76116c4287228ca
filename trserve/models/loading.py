"""Weights into memory: from a checkpoint directory, a GGUF file, or drawn at random.

Knows safetensors files and which loader a model needs; nothing of names of models, of devices'
memory plans or of downloads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from trserve.errors import ModelUnavailableError
from trserve.ipc.slab import available_memory
from trserve.models.aliases import LoadFormat, weight_files
from trserve.models.assembly import (
    UNMAPPED,
    Progress,
    TensorSource,
    assemble,
    expected_tensors,
)
from trserve.models.decoder import Decoder
from trserve.models.dummy import dummy_decoder, dummy_source
from trserve.models.fit import check_weights_fit
from trserve.models.gguf import gguf_source, load_gguf
from trserve.models.spec import ModelSpec
from trserve.models.token_map import TokenMap

Part = Callable[[str, torch.Tensor], torch.Tensor]
"""Of a tensor and its name, the part that is wanted: a view of it, or a small tensor instead."""


def load_model(
    path: Path,
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    load_format: LoadFormat = "auto",
    int8: bool = False,
    progress: Progress | None = None,
    token_map: TokenMap = UNMAPPED,
) -> Decoder:
    """The decoder that :func:`trserve.models.aliases.resolve_model` found at ``path``.

    Args:
        dtype: float32 or bfloat16; the weights are converted to it.
        load_format: as it was given to ``resolve_model``; with ``dummy``, ``path`` is not read.
        int8: whether the projections' weights are then quantized to 8 bits.
        token_map: which rows of the checkpoint stand for which of the server's ids.

    Raises:
        ModelUnavailableError: there is not enough memory (nothing was taken then), or a file is
            missing or damaged, or a tensor is missing or has another shape than ``spec`` says.
    """
    check_weights_fit([(path.stem, spec, dtype.itemsize, int8)], available_memory())
    options: dict[str, Any] = {
        "dtype": dtype,
        "int8": int8,
        "progress": progress,
        "token_map": token_map,
    }
    if load_format == "dummy":
        return dummy_decoder(spec, **options)
    if path.suffix == ".gguf":
        return load_gguf(path, spec, **options)
    return load_decoder(path, spec, **options)


def load_decoder(
    path: Path,
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    int8: bool = False,
    progress: Progress | None = None,
    token_map: TokenMap = UNMAPPED,
) -> Decoder:
    """The decoder in the checkpoint directory ``path``, its weights converted to ``dtype``.

    The files are mapped, not read, so memory never holds more than the decoder and one layer.

    Raises:
        ModelUnavailableError: as :func:`load_model`; the message names the file or tensor.
    """
    with tensors_of(path, spec, dtype=dtype) as read:
        return assemble(spec, read, progress, int8=int8, token_map=token_map)


@contextmanager
def tensors_of(
    path: Path,
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    load_format: LoadFormat = "auto",
    part: Part | None = None,
) -> Iterator[TensorSource]:
    """The tensors that :func:`load_model` would assemble, for who does something else with them.

    Args:
        part: which part of each is wanted; of a mapped file the rest is then not even read.

    Raises:
        ModelUnavailableError: as :func:`load_model`, but memory is not looked at.
    """
    cut = part or _whole
    with ExitStack() as stack:
        if load_format == "dummy":
            read = dummy_source(spec, dtype=dtype)
        elif path.suffix == ".gguf":
            read = gguf_source(path, spec, dtype)
        else:
            located = _locate(stack, path)
            _check(located, spec, path)
            yield lambda name: cut(name, located[name].get_tensor(name)).to(dtype)
            return
        yield lambda name: cut(name, read(name))


def _whole(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _locate(stack: ExitStack, path: Path) -> dict[str, Any]:
    """The open file that holds each tensor."""
    located: dict[str, Any] = {}
    for file in weight_files(path):
        try:
            opened = stack.enter_context(safe_open(file, framework="pt", device="cpu"))
        except (OSError, SafetensorError) as error:
            raise ModelUnavailableError(
                f"{file} is not a readable safetensors file ({error}); copy or download it again"
            ) from None
        located.update((name, opened) for name in opened.keys())  # noqa: SIM118 (not a mapping)
    return located


def _check(located: dict[str, Any], spec: ModelSpec, path: Path) -> None:
    for name, shape in expected_tensors(spec).items():
        if name not in located:
            raise ModelUnavailableError(
                f"{path} lacks the tensor {name}, which {spec.architecture} needs; the checkpoint "
                "is incomplete or its config.json belongs to another model"
            )
        found = tuple(located[name].get_slice(name).get_shape())
        if found != shape:
            raise ModelUnavailableError(
                f"{path}: the tensor {name} has the shape {list(found)}, but config.json asks for "
                f"{list(shape)}; they belong to different models"
            )
