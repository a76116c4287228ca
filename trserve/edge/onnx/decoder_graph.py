"""The graph of a decoder: Qwen3, Qwen2 and Llama, dense, from their tensors by name.

Attention is ONNX Runtime's ``GroupQueryAttention``, whose past and present caches may be one
buffer: then a step writes the keys and values of its own tokens in place, and copies none.

Inputs, for one row (no batch: rows differ in length, and an edge device has few):

==================  ==========  ===============================================================
``ids``             [1, S]      int64, the tokens that are computed
``last``            [1]         int32, index of the row's last token: KV length with them, less 1
``length``          scalar      int32, that KV length
``wanted``          [K]         int64, which of the S tokens outputs are for, the last one last
``past_key.i``      [1, kv, C, d]  float32, layer i's keys; C is the buffer's capacity
``past_value.i``    [1, kv, C, d]  its values
==================  ==========  ===============================================================

Outputs: ``logits`` [1, V] after the last of ``wanted``; ``hidden`` [K, H] after the final norm;
``tap`` [K, H], what the last layer's MLP reads; ``key.i`` and ``value.i``, to be bound to the
memory of their pasts. All float32.

Knows architecture and tensors' names; nothing of files, sessions or requests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from trserve.edge.onnx.graph import MICROSOFT, GraphWriter, WeightsFile
from trserve.edge.onnx.projections import Projector, Weights
from trserve.models.assembly import Progress, TensorSource, layer_prefix
from trserve.models.rope import RotaryTable
from trserve.models.spec import ModelSpec

_EMBEDDING: Final = "model.embed_tokens.weight"


def write_decoder(
    spec: ModelSpec,
    read: TensorSource,
    weights: WeightsFile,
    *,
    positions: int,
    int8: bool = False,
    progress: Progress | None = None,
) -> tuple[GraphWriter, GraphWriter]:
    """The graph of the decoder, and that of its head alone (``hidden`` to ``logits``).

    Args:
        positions: how many the rotary tables have; no row may be longer.
    """
    graph = GraphWriter("decoder", weights)
    return _DecoderWriter(spec, read, graph, int8=int8).write(positions, progress), _write_head(
        spec, read, weights, int8=int8
    )


def _write_head(
    spec: ModelSpec, read: TensorSource, weights: WeightsFile, *, int8: bool
) -> GraphWriter:
    graph = GraphWriter("head", weights)
    writer = _DecoderWriter(spec, read, graph, int8=int8)
    hidden = graph.input("hidden", np.float32, ["K", spec.hidden_size])
    if spec.tie_word_embeddings and not int8:
        graph.constant(_EMBEDDING, writer.read(_EMBEDDING))
    writer.add_head(hidden, ["K", spec.vocab_size])
    return graph


class _DecoderWriter:
    """Adds a decoder to ``graph``, reading each tensor once."""

    def __init__(
        self, spec: ModelSpec, read: TensorSource, graph: GraphWriter, *, int8: bool
    ) -> None:
        self._spec = spec
        self._graph = graph
        self._projector = Projector(graph, int8=int8)
        self.read: Callable[[str], Weights] = lambda name: read(name).float().numpy()

    def write(self, positions: int, progress: Progress | None) -> GraphWriter:
        spec, graph = self._spec, self._graph
        ids = graph.input("ids", np.int64, [1, "S"])
        graph.input("last", np.int32, [1])
        graph.input("length", np.int32, [])
        wanted = graph.input("wanted", np.int64, ["K"])
        self._add_rotary(positions)
        embedding = graph.constant(_EMBEDDING, self.read(_EMBEDDING))
        x = graph.node("Gather", [embedding, ids], "x")
        normed = self._first_norm(x)
        for index in range(spec.num_layers):
            last = index == spec.num_layers - 1
            x, normed = self._add_layer(index, x, normed, wanted if last else None)
            if progress is not None:
                progress(index + 1, spec.num_layers)
        hidden = graph.node(
            "Reshape", [normed, self._shape("flat", -1, spec.hidden_size)], "hidden"
        )
        graph.output("hidden", np.float32, ["K", spec.hidden_size])
        graph.output("tap", np.float32, ["K", spec.hidden_size])
        final = graph.constant("final", np.array([-1]))
        self.add_head(graph.node("Gather", [hidden, final], "last_hidden"), [1, spec.vocab_size])
        return graph

    def add_head(self, hidden: str, shape: list[int | str]) -> None:
        """The output ``logits`` of ``shape``, of the hidden states ``hidden`` [n, H]."""
        if self._spec.tie_word_embeddings:
            out = self._projector.add_tied("head", hidden, _EMBEDDING, self.read(_EMBEDDING))
        else:
            out = self._projector.add("head", hidden, self.read("lm_head.weight"))
        self._graph.node("Identity", [out], "logits")
        self._graph.output("logits", np.float32, shape)

    # -- parts -------------------------------------------------------------------------------

    def _add_rotary(self, positions: int) -> None:
        """Tables [positions, head_dim / 2] for all layers, of the lengths that YaRN wants."""
        table = RotaryTable(self._spec).reaching(positions)[:positions].flatten(1)
        self._graph.constant("cos", table.real.contiguous().numpy())
        self._graph.constant("sin", table.imag.contiguous().numpy())

    def _shape(self, name: str, *sizes: int) -> str:
        return self._graph.constant(f"shape.{name}", np.array(sizes))

    def _first_norm(self, x: str) -> str:
        return self._norm("model.layers.0.input_layernorm.weight", x, "normed")

    def _norm(self, weight: str, x: str, out: str) -> str:
        return self._graph.node(
            "SimplifiedLayerNormalization",
            [x, self._graph.constant(weight, self.read(weight))],
            out,
            axis=-1,
            epsilon=self._spec.rms_norm_eps,
        )

    def _add_and_norm(self, weight: str, x: str, more: str, name: str) -> tuple[str, str]:
        """The sum of ``x`` and ``more``, and its norm, in one pass."""
        total, normed = f"{name}.sum", f"{name}.normed"
        self._graph.node(
            "SkipSimplifiedLayerNormalization",
            [x, more, self._graph.constant(weight, self.read(weight))],
            [normed, "", "", total],
            domain=MICROSOFT,
            epsilon=self._spec.rms_norm_eps,
        )
        return total, normed

    def _add_layer(self, index: int, x: str, normed: str, wanted: str | None) -> tuple[str, str]:
        """Of the last layer, what is behind attention is for the tokens ``wanted`` alone."""
        prefix = layer_prefix(index)
        attended = self._add_attention(index, normed)
        if wanted is not None:
            attended = self._graph.node("Gather", [attended, wanted], "attended.wanted", axis=1)
            x = self._graph.node("Gather", [x, wanted], "x.wanted", axis=1)
        out = self._linear(f"{prefix}self_attn.o_proj", attended, self._spec.output_bias)
        name = f"{prefix}post_attention_layernorm"
        x, normed = self._add_and_norm(f"{name}.weight", x, out, name)
        if wanted is not None:
            self._graph.node(
                "Reshape", [normed, self._shape("flat", -1, self._spec.hidden_size)], "tap"
            )
        final = index == self._spec.num_layers - 1
        following = "model.norm" if final else f"{layer_prefix(index + 1)}input_layernorm"
        mlp = self._add_mlp(f"{prefix}mlp.", normed)
        return self._add_and_norm(f"{following}.weight", x, mlp, f"{prefix}out")

    def _linear(self, name: str, x: str, bias: bool) -> str:
        biases = self.read(f"{name}.bias") if bias else None
        return self._projector.add(name, x, self.read(f"{name}.weight"), biases)

    def _add_attention(self, index: int, normed: str) -> str:
        spec, prefix = self._spec, f"{layer_prefix(index)}self_attn."
        parts = [f"{prefix}{part}_proj" for part in "qkv"]
        weight = np.concatenate([self.read(f"{part}.weight") for part in parts])
        bias = None
        if spec.attention_bias:
            bias = np.concatenate([self.read(f"{part}.bias") for part in parts])
        fused = self._projector.add(f"{prefix}qkv", normed, weight, bias)
        query = [fused, "", ""]  # queries, keys and values side by side
        if spec.qk_norm:
            query = self._norm_heads(prefix, fused)
        pasts = [
            self._graph.input(f"past_{kind}.{index}", np.float32, self._cache_shape)
            for kind in ("key", "value")
        ]
        presents = [f"{kind}.{index}" for kind in ("key", "value")]
        attended = self._graph.node(
            "GroupQueryAttention",
            [*query, *pasts, "last", "length", "cos", "sin"],
            [f"{prefix}attended", *presents],
            domain=MICROSOFT,
            num_heads=spec.num_heads,
            kv_num_heads=spec.num_kv_heads,
            do_rotary=1,
        )
        for name in presents:
            self._graph.output(name, np.float32, self._cache_shape)
        return attended

    @property
    def _cache_shape(self) -> list[int | str]:
        return [1, self._spec.num_kv_heads, "C", self._spec.head_dim]

    def _norm_heads(self, prefix: str, fused: str) -> list[str]:
        """Queries, keys and values apart, the first two normalised head by head (Qwen3)."""
        spec, graph = self._spec, self._graph
        sizes = (spec.q_size, spec.kv_size, spec.kv_size)
        parts = [f"{prefix}{part}" for part in "qkv"]
        graph.node("Split", [fused, self._shape("qkv", *sizes)], parts, axis=-1)
        normed = []
        for part, heads in zip("qk", (spec.num_heads, spec.num_kv_heads), strict=True):
            name = f"{prefix}{part}"
            by_head = self._shape(f"{part}.heads", 1, -1, heads, spec.head_dim)
            flat = self._shape(f"{part}.flat", 1, -1, heads * spec.head_dim)
            split = graph.node("Reshape", [name, by_head], f"{name}.heads")
            done = self._norm(f"{prefix}{part}_norm.weight", split, f"{name}.normed")
            normed.append(graph.node("Reshape", [done, flat], f"{name}.flat"))
        return [*normed, parts[2]]

    def _add_mlp(self, prefix: str, normed: str) -> str:
        spec, graph = self._spec, self._graph
        gate = self._linear(f"{prefix}gate_proj", normed, spec.mlp_bias)
        up = self._linear(f"{prefix}up_proj", normed, spec.mlp_bias)
        # x * sigmoid(alpha * x): with an alpha of 1, SiLU.
        active = graph.node("QuickGelu", [gate], f"{prefix}act", domain=MICROSOFT, alpha=1.0)
        product = graph.node("Mul", [active, up], f"{prefix}product")
        return self._linear(f"{prefix}down_proj", product, spec.mlp_bias)
