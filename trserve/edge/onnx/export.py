"""From a model to a directory that ONNX Runtime can run and ``--models`` can name.

The manifest is written last, when the graphs were found to compute what torch computes: a directory
without one is no model. Knows the order; graphs, files and comparisons are others'.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec
import torch

from trserve.edge.onnx.copying import copy_beside
from trserve.edge.onnx.files import FORMAT, GRAPH, HEAD, MANIFEST, WEIGHTS, Manifest
from trserve.edge.onnx.placement import check_exportable, check_packages
from trserve.edge.onnx.verify import LENGTH, Difference, compare
from trserve.errors import ModelUnavailableError
from trserve.models.aliases import LoadFormat, ResolvedModel
from trserve.models.assembly import Progress
from trserve.models.loading import load_model, tensors_of
from trserve.models.spec import ModelSpec
from trserve.record_format import weights_digest
from trserve.workers.kv_cache import KVCache
from trserve.workers.runner import TorchRunner

TOLERANCE: Final = 1e-3
"""How far a float32 graph may be from torch, in any logit, hidden state or tap."""
_BLOCK_SIZE: Final = 16


def export(
    model: ResolvedModel,
    directory: Path,
    *,
    int8: bool = False,
    load_format: LoadFormat = "auto",
    threads: int = 1,
    progress: Progress | None = None,
) -> Difference:
    """Write ``model`` to ``directory``, which is there; returns how far it is from torch.

    What it takes of memory is two models: the graph's and torch's, for the comparison.

    Raises:
        ModelUnavailableError: a package is missing, the model cannot be exported, or in float32 it
            differs from torch by more than :data:`TOLERANCE`; then there is no manifest.
    """
    check_packages("to export a model")
    check_exportable(model.spec, model.name)
    spec, positions = model.spec, model.spec.max_position_embeddings
    write_graphs(model.path, spec, directory, int8=int8, load_format=load_format, progress=progress)
    copy_beside(model, directory)
    drawn = load_format == "dummy"
    manifest = Manifest(
        format=FORMAT,
        source="" if drawn else weights_digest(model.path),
        int8=int8,
        positions=positions,
        largest_difference=0.0,
    )
    difference = _compare(model.path, spec, directory, load_format, threads)
    if difference.largest > TOLERANCE and not int8:
        raise ModelUnavailableError(
            f"the graph of {model.name} differs from torch: {difference}; {TOLERANCE:g} is "
            f"allowed, so {directory} is no model"
        )
    manifest = msgspec.structs.replace(manifest, largest_difference=difference.largest)
    (directory / MANIFEST).write_bytes(msgspec.json.encode(manifest))
    return difference


def write_graphs(
    path: Path,
    spec: ModelSpec,
    directory: Path,
    *,
    int8: bool,
    load_format: LoadFormat = "auto",
    progress: Progress | None = None,
) -> None:
    """Write both graphs and their weights."""
    from trserve.edge.onnx.decoder_graph import write_decoder
    from trserve.edge.onnx.graph import WeightsFile

    weights = WeightsFile(directory / WEIGHTS)
    try:
        with tensors_of(path, spec, dtype=torch.float32, load_format=load_format) as read:
            decoder, head = write_decoder(
                spec,
                read,
                weights,
                positions=spec.max_position_embeddings,
                int8=int8,
                progress=progress,
            )
    finally:
        weights.close()
    decoder.save(directory / GRAPH)
    head.save(directory / HEAD)


def _compare(
    path: Path, spec: ModelSpec, directory: Path, load_format: LoadFormat, threads: int
) -> Difference:
    from trserve.edge.onnx.runner import OnnxRunner

    ours = OnnxRunner(
        directory,
        spec,
        rows=1,
        capacity=LENGTH,
        max_rows=1,
        threads=threads,
        tokenizer_size=spec.vocab_size,
    )
    decoder = load_model(path, spec, dtype=torch.float32, load_format=load_format)
    blocks = -(-LENGTH // _BLOCK_SIZE)
    kv = KVCache(spec, num_blocks=blocks, block_size=_BLOCK_SIZE, dtype=torch.float32)
    torchs = TorchRunner(decoder, kv, tokenizer_size=spec.vocab_size)
    for runner in (ours, torchs):
        runner.keep_tap()
    return compare(torchs, _BLOCK_SIZE, ours, LENGTH, spec.vocab_size)
