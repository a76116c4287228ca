"""Weights: from a checkpoint directory, or drawn at random, to a :class:`Decoder`.

Knows tensor names and how the decoder wants its weights fused; nothing of devices' memory plans,
of names of models or of downloads.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from trserve.errors import ModelUnavailableError
from trserve.models.aliases import weight_files
from trserve.models.decoder import Decoder, DecoderLayer, Linear, RMSNorm
from trserve.models.rope import interleave
from trserve.models.spec import ModelSpec

Progress = Callable[[int, int], None]
"""Called with the number of layers loaded and the number in all."""

_Source = Callable[[str], torch.Tensor]

_INIT_STD = 0.02
"""Standard deviation of dummy weights: the initializer_range of the supported families."""


def load_decoder(
    path: Path, spec: ModelSpec, *, dtype: torch.dtype, progress: Progress | None = None
) -> Decoder:
    """The decoder in the checkpoint directory ``path``, its weights converted to ``dtype``.

    The files are mapped, not read, so memory never holds more than the decoder and one layer.

    Raises:
        ModelUnavailableError: a file is missing or damaged, or a tensor is missing or has another
            shape than ``spec`` says; the message names it.
    """
    with ExitStack() as stack:
        located = _locate(stack, path)
        _check(located, spec, path)

        def read(name: str) -> torch.Tensor:
            tensor: torch.Tensor = located[name].get_tensor(name)
            return tensor.to(dtype)

        return _assemble(spec, read, progress)


def dummy_decoder(spec: ModelSpec, *, dtype: torch.dtype, seed: int = 0) -> Decoder:
    """A decoder of the given shape with random weights, the same for the same seed.

    Every tensor has a generator of its own, so that the weights of one layer do not depend on the
    number of layers.
    """
    shapes = expected_tensors(spec)

    def draw(name: str) -> torch.Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shapes[name], dtype=dtype)
        generator = torch.Generator().manual_seed(_stable_seed(seed, name))
        return torch.empty(shapes[name]).normal_(0.0, _INIT_STD, generator=generator).to(dtype)

    return _assemble(spec, draw, None)


def expected_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of ``spec`` must hold."""
    hidden, inter = spec.hidden_size, spec.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (spec.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not spec.tie_word_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    linears = (
        ("self_attn.q_proj", spec.q_size, hidden, spec.attention_bias),
        ("self_attn.k_proj", spec.kv_size, hidden, spec.attention_bias),
        ("self_attn.v_proj", spec.kv_size, hidden, spec.attention_bias),
        ("self_attn.o_proj", hidden, spec.q_size, spec.output_bias),
        ("mlp.gate_proj", inter, hidden, spec.mlp_bias),
        ("mlp.up_proj", inter, hidden, spec.mlp_bias),
        ("mlp.down_proj", hidden, inter, spec.mlp_bias),
    )
    for layer in range(spec.num_layers):
        prefix = _prefix(layer)
        for name, rows, columns, bias in linears:
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}{name}.weight"] = (hidden,)
        for name in ("self_attn.q_norm", "self_attn.k_norm") if spec.qk_norm else ():
            shapes[f"{prefix}{name}.weight"] = (spec.head_dim,)
    return shapes


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


def _assemble(spec: ModelSpec, read: _Source, progress: Progress | None) -> Decoder:
    embedding = read("model.embed_tokens.weight")
    layers = []
    for index in range(spec.num_layers):
        layers.append(_layer(spec, read, _prefix(index)))
        if progress is not None:
            progress(index + 1, spec.num_layers)
    return Decoder(
        spec,
        embedding=embedding,
        layers=layers,
        norm=RMSNorm(read("model.norm.weight"), spec.rms_norm_eps),
        head=embedding if spec.tie_word_embeddings else read("lm_head.weight"),
    )


def _layer(spec: ModelSpec, read: _Source, prefix: str) -> DecoderLayer:
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."

    def linear(names: tuple[str, ...], bias: bool, norm: RMSNorm | None = None) -> Linear:
        weight = _fuse(spec, [read(f"{name}.weight") for name in names])
        if norm is not None and weight.dtype == torch.float32:
            weight = weight * norm.scale
        return Linear(
            weight, _fuse(spec, [read(f"{name}.bias") for name in names]) if bias else None
        )

    def norm(name: str) -> RMSNorm:
        # In float32 the scale goes into the projection behind the norm; in bfloat16 that would
        # round it a second time.
        weight = read(f"{prefix}{name}.weight")
        return RMSNorm(weight, spec.rms_norm_eps, scaled=weight.dtype != torch.float32)

    input_norm, mlp_norm = norm("input_layernorm"), norm("post_attention_layernorm")
    qkv = tuple(f"{attention}{kind}_proj" for kind in "qkv")
    return DecoderLayer(
        input_norm=input_norm,
        qkv=linear(qkv, spec.attention_bias, input_norm),
        qk_norm=_qk_norm(spec, read, attention) if spec.qk_norm else None,
        output=linear((f"{attention}o_proj",), spec.output_bias),
        mlp_norm=mlp_norm,
        gate_up=linear((f"{mlp}gate_proj", f"{mlp}up_proj"), spec.mlp_bias, mlp_norm),
        down=linear((f"{mlp}down_proj",), spec.mlp_bias),
    )


def _fuse(spec: ModelSpec, parts: list[torch.Tensor]) -> torch.Tensor:
    """One projection of several: queries, keys and values by KV head, anything else in order."""
    if len(parts) != 3:
        return torch.cat(parts)
    query, key, value = parts
    parts = [interleave(query, spec.head_dim), interleave(key, spec.head_dim), value]
    by_head = [part.reshape(spec.num_kv_heads, -1, *part.shape[1:]) for part in parts]
    return torch.cat(by_head, dim=1).flatten(0, 1)


def _qk_norm(spec: ModelSpec, read: _Source, attention: str) -> RMSNorm:
    """One norm over a KV head's queries and its key: one weight row a head."""
    query = interleave(read(f"{attention}q_norm.weight"), spec.head_dim)
    key = interleave(read(f"{attention}k_norm.weight"), spec.head_dim)
    rows = (query.expand(spec.num_heads // spec.num_kv_heads, -1), key[None])
    return RMSNorm(torch.cat(rows), spec.rms_norm_eps)


def _prefix(layer: int) -> str:
    return f"model.layers.{layer}."


def _stable_seed(seed: int, name: str) -> int:
    """FNV-1a of seed and name: ``hash`` differs between processes."""
    state = 0xCBF29CE484222325
    for byte in f"{seed}/{name}".encode():
        state = ((state ^ byte) * 0x100000001B3) % (1 << 64)
    return state >> 1
