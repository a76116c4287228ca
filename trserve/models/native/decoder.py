"""A dense decoder's forward pass in one call of the compiled kernels.

Reads the same weights and the same KV cache as the torch path, which takes what the kernels do not
know. Nothing is copied: the structures below point into the tensors, which this object keeps alive.

A token's results depend on its own row alone, to the last bit (see ``linear.h``): not on its
neighbours in the batch, nor on the chunks in which the row was computed, nor on what came from the
prefix cache. The exception are processors with matrix units (AMX), which torch uses and the kernels
do not: there, bfloat16 steps of more tokens than LARGE_STEP are torch's.

Knows nothing of requests, of batches' composition or of threads' number and place.
"""

from __future__ import annotations

import ctypes
import os
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from trserve.models.decoder import Decoder, DecoderLayer
from trserve.models.layers import Linear, RMSNorm
from trserve.models.mlp import DenseMlp
from trserve.models.native.library import (
    CLayer,
    CMatrix,
    CModel,
    CStep,
    Library,
    load_library,
    processor_flags,
)
from trserve.models.native.support import KINDS, supported
from trserve.workers.kv_cache import KVCache
from trserve.workers.step import StepInputs

LARGE_STEP: Final = 64
_UNLIMITED: Final = 1 << 30
_MATRIX_UNITS: Final = "amx_bf16"


def _spin_rounds() -> int:
    """As OpenMP's threads: the worker's environment says whether cores are its own."""
    rounds = os.environ.get("GOMP_SPINCOUNT", "0")
    return int(rounds) if rounds.isdecimal() else 0


class NativeDecoder:
    """Runs ``decoder`` over ``kv``.

    Args:
        head: the output projection, in rows as the decoder's own.

    Attributes:
        max_tokens: steps of more tokens are better computed by torch.
    """

    def __init__(self, decoder: Decoder, kv: KVCache, head: Linear) -> None:
        library = load_library()
        assert library is not None and supported(decoder.spec, decoder.dtype)
        self._library: Library = library
        self._decoder = decoder
        self._kv = kv
        self._head = head
        spec = decoder.spec
        self._layers = (CLayer * max(1, spec.num_layers))(
            *(_layer(layer, kv.layers[i]) for i, layer in enumerate(decoder.layers))
        )
        model = CModel(
            layers=self._layers,
            embedding=decoder.embedding.data_ptr(),
            final_norm=decoder.norm.scale.data_ptr(),
            tap_norm=_tap_norm(decoder),
            head=_matrix(head),
            num_layers=spec.num_layers,
            hidden=spec.hidden_size,
            intermediate=spec.intermediate_size,
            heads=spec.num_heads,
            kv_heads=spec.num_kv_heads,
            dim=spec.head_dim,
            block_size=kv.block_size,
            kind=KINDS[decoder.dtype],
            eps=spec.rms_norm_eps,
        )
        matrix_units = _MATRIX_UNITS in processor_flags() and decoder.dtype == torch.bfloat16
        self.max_tokens = LARGE_STEP if matrix_units else _UNLIMITED
        functions = library.functions
        self._model = functions.trs_create(
            ctypes.byref(model), torch.get_num_threads(), _spin_rounds()
        )
        self._run = functions.trs_step
        self._step = CStep()
        self._step_address = ctypes.addressof(self._step)
        self._inputs: StepInputs | None = None
        self._hidden = torch.empty(0, spec.hidden_size)
        self._logits = torch.empty(0, spec.vocab_size)
        self._tap: torch.Tensor | None = None
        self._wanted = np.zeros(0, np.int64)

    def keep_tap(self) -> None:
        """Give what the last layer's MLP reads with every step from now on."""
        self._tap = torch.empty_like(self._hidden[: len(self._logits)])
        self._step.tap = self._tap.data_ptr()

    def __del__(self) -> None:
        model = getattr(self, "_model", None)
        if model:
            self._library.functions.trs_destroy(model)

    def forward(
        self, inputs: StepInputs, also: NDArray[np.int64] | None, heartbeat: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Logits [B, vocab_size] and hidden states [B, hidden_size] after each row's last token.

        Both are float32 and lie in buffers that the next call overwrites. The third result holds
        the hidden states of the tokens ``also``, if any are named; the fourth, after
        :meth:`keep_tap`, [B, hidden_size] what the last layer's MLP read. ``heartbeat`` is the
        address of a word that is set before each layer to ``time.monotonic_ns``; 0 where nobody
        looks.
        """
        if inputs is not self._inputs:
            self._use(inputs)
        step, rows = self._step, inputs.num_rows
        step.tokens, step.rows = inputs.num_tokens, rows
        wanted = rows + (0 if also is None else len(also))
        self._make_room(rows, wanted)
        np.subtract(inputs.query_start[1 : rows + 1], 1, out=self._wanted[:rows], casting="safe")
        if also is not None:
            self._wanted[rows:wanted] = also
        step.heartbeat = heartbeat
        step.hidden_count, step.logits_count = wanted, rows
        step.rotations = self._decoder.rotary.reaching(int(inputs.kv_len[:rows].max())).data_ptr()
        self._run(self._model, self._step_address)
        further = None if also is None else self._hidden[rows:wanted].clone()
        tap = None if self._tap is None else self._tap[:rows]
        return self._logits[:rows], self._hidden[:rows], further, tap

    def _make_room(self, rows: int, wanted: int) -> None:
        """Buffers for twice as much as is too much for them: a batch grows one by one."""
        if wanted > len(self._wanted):
            self._wanted = np.zeros(2 * wanted, np.int64)
            self._hidden = torch.empty(2 * wanted, self._hidden.shape[1])
            self._step.wanted = self._wanted.ctypes.data
            self._step.hidden = self._hidden.data_ptr()
        if rows > len(self._logits):
            self._logits = torch.empty(2 * rows, self._logits.shape[1])
            self._step.logits = self._logits.data_ptr()
            if self._tap is not None:
                self._tap = torch.empty(2 * rows, self._hidden.shape[1])
                self._step.tap = self._tap.data_ptr()

    def _use(self, inputs: StepInputs) -> None:
        step = self._step
        step.token_ids = inputs.token_ids.ctypes.data
        step.positions = inputs.positions.ctypes.data
        step.slots = inputs.slots.ctypes.data
        step.query_start = inputs.query_start.ctypes.data
        step.block_tables = inputs.block_tables.ctypes.data
        step.table_stride = inputs.block_tables.shape[1]
        self._inputs = inputs


def _tap_norm(decoder: Decoder) -> int | None:
    return decoder.layers[-1].mlp.norm.scale.data_ptr() if decoder.layers else None


def _layer(layer: DecoderLayer, cache: torch.Tensor) -> CLayer:
    mlp = layer.mlp
    assert isinstance(mlp, DenseMlp)
    return CLayer(
        qkv=_matrix(layer.qkv),
        output=_matrix(layer.output),
        gate_up=_matrix(mlp.gate_up),
        down=_matrix(mlp.down),
        input_norm=_scale(layer.input_norm),
        mlp_norm=_scale(mlp.norm),
        head_norm=None if layer.qk_norm is None else layer.qk_norm.scale.data_ptr(),
        cache=cache.data_ptr(),
    )


def _matrix(linear: Linear) -> CMatrix:
    rows = linear.rows
    assert rows is not None and rows.is_contiguous()
    return CMatrix(
        weights=rows.data_ptr(),
        scales=None if linear.scales is None else linear.scales.data_ptr(),
        bias=None if linear.bias is None else linear.bias.data_ptr(),
        rows=rows.shape[0],
        columns=rows.shape[1],
        kind=KINDS[rows.dtype],
    )


def _scale(norm: RMSNorm) -> int | None:
    return norm.scale.data_ptr() if norm.scaled else None
