"""From named tensors to a :class:`Decoder`: which there must be, and how they are fused.

Tensors go by the names and layouts that transformers writes, wherever they come from. Knows
nothing of files or formats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from trserve.models.decoder import Decoder, DecoderLayer
from trserve.models.layers import Linear, RMSNorm
from trserve.models.mlp import DenseMlp, Expert, SparseMlp
from trserve.models.native.support import supported
from trserve.models.quantized import Int8Linear
from trserve.models.rope import interleave
from trserve.models.sharding import WHOLE, Shard
from trserve.models.spec import ExpertsSpec, ModelSpec
from trserve.models.token_map import TokenMap

UNMAPPED = TokenMap()

Progress = Callable[[int, int], None]
"""Called with the number of layers loaded and the number in all."""

TensorSource = Callable[[str], torch.Tensor]
"""The tensor of a name, in the dtype of the decoder to be."""

_Shaped = tuple[str, int, int, bool]
"""A projection: its name within the layer, rows, columns, and whether it has a bias."""


def expected_tensors(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of ``spec`` must hold."""
    hidden = spec.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (spec.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not spec.tie_word_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    for layer in range(spec.num_layers):
        prefix = layer_prefix(layer)
        for name, rows, columns, bias in _projections(spec, layer):
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}{name}.weight"] = (hidden,)
        for name in ("self_attn.q_norm", "self_attn.k_norm") if spec.qk_norm else ():
            shapes[f"{prefix}{name}.weight"] = (spec.head_dim,)
    return shapes


def layer_prefix(layer: int) -> str:
    """What the names of a layer's tensors begin with."""
    return f"model.layers.{layer}."


def _projections(spec: ModelSpec, layer: int) -> Iterator[_Shaped]:
    hidden = spec.hidden_size
    yield "self_attn.q_proj", spec.q_size, hidden, spec.attention_bias
    yield "self_attn.k_proj", spec.kv_size, hidden, spec.attention_bias
    yield "self_attn.v_proj", spec.kv_size, hidden, spec.attention_bias
    yield "self_attn.o_proj", hidden, spec.q_size, spec.output_bias
    if spec.experts is None or not spec.has_experts(layer):
        yield from _gated_mlp("mlp.", hidden, spec.intermediate_size, spec.mlp_bias)
        return
    yield "mlp.gate", spec.experts.count, hidden, False
    for expert in range(spec.experts.count):
        prefix = f"mlp.experts.{expert}."
        yield from _gated_mlp(prefix, hidden, spec.experts.intermediate_size, False)


def _gated_mlp(prefix: str, hidden: int, inter: int, bias: bool) -> Iterator[_Shaped]:
    yield f"{prefix}gate_proj", inter, hidden, bias
    yield f"{prefix}up_proj", inter, hidden, bias
    yield f"{prefix}down_proj", hidden, inter, bias


def assemble(
    spec: ModelSpec,
    read: TensorSource,
    progress: Progress | None = None,
    *,
    int8: bool = False,
    token_map: TokenMap = UNMAPPED,
    shard: Shard = WHOLE,
) -> Decoder:
    """The decoder of ``spec`` with the tensors of ``read``, each of which is read once.

    With ``int8`` the weights of all projections are quantized as they come. ``token_map`` says
    which rows of the embedding and of the head stand for which ids. Of a model that several
    processes share, ``spec`` and ``read`` are those of the share ``shard``.
    """
    embedding = _in_order(read("model.embed_tokens.weight"), token_map)
    on_cpu = embedding.device.type == "cpu" and shard.size == 1
    native = on_cpu and supported(spec, embedding.dtype)
    layers = []
    for index in range(spec.num_layers):
        builder = _LayerBuilder(spec, read, index, native=native, int8=int8, shard=shard)
        layers.append(builder.build())
        if progress is not None:
            progress(index + 1, spec.num_layers)
    return Decoder(
        spec,
        embedding=embedding,
        layers=layers,
        norm=RMSNorm(read("model.norm.weight"), spec.rms_norm_eps),
        head=embedding
        if spec.tie_word_embeddings
        else _in_order(read("lm_head.weight"), token_map),
        native=native,
        int8=int8,
        absent=token_map.absent,
    )


def _in_order(rows: torch.Tensor, token_map: TokenMap) -> torch.Tensor:
    """``rows`` [V, hidden] by the server's ids: themselves, unless some have to move."""
    if not token_map.moved:
        return rows
    ids, places = map(list, zip(*token_map.moved, strict=True))
    ordered = rows.clone()
    ordered[ids] = rows[places]
    return ordered


class _LayerBuilder:
    """Fuses the tensors of one layer."""

    def __init__(
        self,
        spec: ModelSpec,
        read: TensorSource,
        layer: int,
        *,
        native: bool,
        int8: bool,
        shard: Shard,
    ) -> None:
        self._spec, self._layer, self._native, self._int8 = spec, layer, native, int8
        self._shard = shard
        prefix = layer_prefix(layer)
        self._read: TensorSource = lambda name: read(f"{prefix}{name}")

    def build(self) -> DecoderLayer:
        spec = self._spec
        input_norm = self._norm("input_layernorm")
        qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        return DecoderLayer(
            input_norm=input_norm,
            qkv=self._linear(qkv, spec.attention_bias, input_norm, fuse=self._by_kv_head),
            qk_norm=self._qk_norm() if spec.qk_norm else None,
            output=self._linear(("self_attn.o_proj",), spec.output_bias),
            mlp=self._mlp(),
        )

    def _norm(self, name: str) -> RMSNorm:
        # In float32 the scale goes into the projection behind the norm; in bfloat16 that would
        # round it a second time.
        weight = self._read(f"{name}.weight")
        return RMSNorm(weight, self._spec.rms_norm_eps, scaled=weight.dtype != torch.float32)

    def _linear(
        self,
        names: tuple[str, ...],
        bias: bool,
        norm: RMSNorm | None = None,
        fuse: Callable[[list[torch.Tensor]], torch.Tensor] = torch.cat,
        exact: bool = False,
    ) -> Linear:
        """One projection of several; ``norm`` is what its input comes from.

        An ``exact`` one is never quantized: the choice of experts is small and sensitive.
        """
        weight = fuse([self._read(f"{name}.weight") for name in names])
        if norm is not None and weight.dtype == torch.float32:
            weight = weight * norm.scale
        biases = fuse([self._read(f"{name}.bias") for name in names]) if bias else None
        if self._int8 and not exact:
            return self._shard.narrow(names[0], Int8Linear(weight, biases))
        return Linear(weight, biases, native=self._native)

    def _by_kv_head(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Queries, keys and values, rotary pairs side by side, ordered by KV head."""
        query, key, value = parts
        dim = self._spec.head_dim
        by_head = [
            part.reshape(self._spec.num_kv_heads, -1, *part.shape[1:])
            for part in (interleave(query, dim), interleave(key, dim), value)
        ]
        return torch.cat(by_head, dim=1).flatten(0, 1)

    def _qk_norm(self) -> RMSNorm:
        """One norm over a KV head's queries and its key: one weight row a head."""
        spec = self._spec
        query = interleave(self._read("self_attn.q_norm.weight"), spec.head_dim)
        key = interleave(self._read("self_attn.k_norm.weight"), spec.head_dim)
        rows = (query.expand(spec.num_heads // spec.num_kv_heads, -1), key[None])
        return RMSNorm(torch.cat(rows), spec.rms_norm_eps)

    def _mlp(self) -> DenseMlp | SparseMlp:
        spec = self._spec
        norm = self._norm("post_attention_layernorm")
        if spec.experts is not None and spec.has_experts(self._layer):
            return self._sparse_mlp(norm, spec.experts)
        return DenseMlp(norm, *self._gated_mlp("mlp.", spec.mlp_bias, norm))

    def _sparse_mlp(self, norm: RMSNorm, experts: ExpertsSpec) -> SparseMlp:
        return SparseMlp(
            norm,
            self._linear(("mlp.gate",), False, norm, exact=True),
            [
                Expert(*self._gated_mlp(f"mlp.experts.{index}.", False, norm))
                for index in range(experts.count)
            ],
            active=experts.active,
            normalized=experts.normalized,
        )

    def _gated_mlp(self, prefix: str, bias: bool, norm: RMSNorm) -> tuple[Linear, Linear]:
        gate_up = self._linear((f"{prefix}gate_proj", f"{prefix}up_proj"), bias, norm)
        return gate_up, self._linear((f"{prefix}down_proj",), bias)
