"""Weights of a GGUF file: found by name, dequantized one by one, laid out as transformers does.

Knows the file's tensor names and its order of rows; the quantized formats are read by the package
``gguf``, which is imported only where a file needs it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from trserve.errors import ModelUnavailableError
from trserve.models.assembly import UNMAPPED, Progress, TensorSource, assemble, expected_tensors
from trserve.models.decoder import Decoder
from trserve.models.gguf_file import QUANTIZATIONS, GgufFile
from trserve.models.rope import deinterleave
from trserve.models.spec import ModelSpec
from trserve.models.token_map import TokenMap

_OUTSIDE_LAYERS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_IN_LAYERS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_NAME = re.compile(r"(?:model\.layers\.(\d+)\.)?(.+)\.(weight|bias)")
_ROTATED = re.compile(r".*\.[qk]_proj\.(?:weight|bias)")

_SLAB = 1 << 22
"""Weights dequantized at a time: what is in flight stays small beside the model."""

_PLAIN_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def load_gguf(
    path: Path,
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    int8: bool = False,
    progress: Progress | None = None,
    token_map: TokenMap = UNMAPPED,
) -> Decoder:
    """The decoder in the GGUF file ``path``, its weights dequantized and converted to ``dtype``.

    The file is mapped, not read, so memory never holds more than the decoder and one layer.

    Raises:
        ModelUnavailableError: as :func:`gguf_source`.
    """
    read = gguf_source(path, spec, dtype)
    return assemble(spec, read, progress, int8=int8, token_map=token_map)


def gguf_source(path: Path, spec: ModelSpec, dtype: torch.dtype) -> TensorSource:
    """The tensors of the GGUF file ``path``, dequantized and converted to ``dtype``.

    Raises:
        ModelUnavailableError: the file is damaged, or a tensor is missing or has another shape
            than ``spec`` says; the message names it.
    """
    file = GgufFile(path)
    shapes = expected_tensors(spec)
    _check(file, shapes)
    # Files of the llama architecture hold the rows of queries and keys pair by pair.
    paired = spec.architecture == "LlamaForCausalLM"

    def read(name: str) -> torch.Tensor:
        tensor = read_tensor(file, stored_name(name), dtype)
        if paired and _ROTATED.fullmatch(name):
            tensor = deinterleave(tensor, spec.head_dim)
        return tensor

    return read


def stored_name(name: str) -> str:
    """What GGUF calls the tensor that transformers calls ``name``."""
    match = _NAME.fullmatch(name)
    assert match is not None, name
    layer, part, kind = match.groups()
    if layer is None:
        return f"{_OUTSIDE_LAYERS[part]}.{kind}"
    return f"blk.{layer}.{_IN_LAYERS[part]}.{kind}"


def read_tensor(file: GgufFile, name: str, dtype: torch.dtype) -> torch.Tensor:
    """The tensor ``name`` of ``file``, dequantized, in memory of its own."""
    entry = file.tensors[name]
    raw = file.raw(name)
    plain = _PLAIN_DTYPES.get(QUANTIZATIONS[entry.type].name)
    if plain is not None:
        return torch.from_numpy(raw).view(plain).view(entry.shape).to(dtype, copy=True)
    return _dequantized(raw, entry.type, entry.shape, dtype)


def _dequantized(
    raw: npt.NDArray[np.uint8], kind: int, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    dequantize = _dequantizer(kind)
    width = shape[-1]
    rows = raw.reshape(prod(shape[:-1]), -1)
    out = torch.empty(len(rows), width, dtype=dtype)
    step = max(1, _SLAB // width)
    for first in range(0, len(rows), step):
        part = slice(first, first + step)
        out[part] = torch.from_numpy(dequantize(rows[part]))
    return out.view(shape)


def _dequantizer(kind: int) -> Callable[[npt.NDArray[np.uint8]], npt.NDArray[np.float32]]:
    """From rows of blocks [n, bytes] to rows of weights [n, weights]."""
    try:
        from gguf import GGMLQuantizationType, quants
    except ImportError:
        raise ModelUnavailableError(
            "reading quantized GGUF files needs the package gguf: pip install trserve[gguf]"
        ) from None
    return partial(quants.dequantize, qtype=GGMLQuantizationType(kind))


def _check(file: GgufFile, shapes: dict[str, tuple[int, ...]]) -> None:
    for name, shape in shapes.items():
        stored = stored_name(name)
        entry = file.tensors.get(stored)
        if entry is None:
            raise ModelUnavailableError(
                f"{file.path} lacks the tensor {stored} ({name}); the file is incomplete"
            )
        if entry.shape != shape:
            raise ModelUnavailableError(
                f"{file.path}: the tensor {stored} has the shape {list(entry.shape)}, but the "
                f"file's metadata asks for {list(shape)}"
            )
