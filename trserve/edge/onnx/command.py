"""``trserve export-onnx``: one model into one directory, and what was found. Knows no click."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from trserve.edge.onnx.files import WEIGHTS, is_onnx_model
from trserve.edge.onnx.placement import check_exportable, check_packages
from trserve.errors import ConfigError
from trserve.models.aliases import resolve_model

_MIB = 2**20


def export_onnx(name: str, out: Path, *, int8: bool) -> Iterator[str]:
    """Write the model ``name`` to ``out``; yields what to tell.

    Raises:
        ConfigError: ``out`` holds something, or the model is an export already.
        ModelUnavailableError: there is no such model, a package is missing, or the export differs.
    """
    check_packages("export-onnx")
    model = resolve_model(name)
    if is_onnx_model(model.path):
        raise ConfigError(f"--model {name}: is an export already; name the model it was made from")
    check_exportable(model.spec, model.name)
    if out.exists() and any(out.iterdir()):
        raise ConfigError(
            f"--out {out}: is not empty; name a new directory, or remove this one if it is of an "
            "export that was ended"
        )
    out.mkdir(parents=True, exist_ok=True)

    from trserve.edge.onnx.export import export

    difference = export(model, out, int8=int8, threads=len(os.sched_getaffinity(0)))
    size = (out / WEIGHTS).stat().st_size
    yield f"wrote {out}: {model.name} in {'8 bits' if int8 else 'float32'}, {size / _MIB:.0f} MiB"
    yield f"largest difference from torch: {difference}"
    if int8:
        yield f"the most probable token is torch's in {difference.agreement:.0%} of the steps"
    yield f"trserve edge --model {out} --cloud HOST:PORT"
