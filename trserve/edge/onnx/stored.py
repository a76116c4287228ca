"""Models that were exported on the way, because a server needed them: where they are kept.

Below the user's cache (``XDG_CACHE_HOME``), one directory for each checkpoint and precision. Knows
names, locks and the order of making one; imports torch only to export.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from trserve.edge.onnx.files import FORMAT, is_onnx_model, read_manifest
from trserve.errors import ConfigError, ModelUnavailableError
from trserve.models.aliases import LoadFormat, ResolvedModel
from trserve.record_format import weights_digest

if TYPE_CHECKING:
    from trserve.models.assembly import Progress

log = logging.getLogger(__name__)
LOCK_TIMEOUT_S: Final = 600.0
"""Longest wait for another process that exports the same model."""
_LOOK_EVERY_S: Final = 0.2


def stored_path(model: ResolvedModel, *, int8: bool, load_format: LoadFormat = "auto") -> Path:
    """The directory that holds the export of ``model``, whether or not there is one."""
    if load_format == "dummy":  # its shape is all that there is of it
        shape = repr(replace(model.spec, eos_token_ids=()))
        digest = "dummy-" + hashlib.blake2b(shape.encode(), digest_size=8).hexdigest()
    else:
        digest = weights_digest(model.path)
    name = re.sub(r"[^\w.-]", "-", model.name)
    precision = "int8" if int8 else "float32"
    root = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return root / "trserve" / "onnx" / f"{name}-{digest}-{precision}-{FORMAT}"


def exported(
    model: ResolvedModel,
    *,
    int8: bool,
    load_format: LoadFormat = "auto",
    threads: int = 1,
    progress: Progress | None = None,
) -> Path:
    """A directory with the export of ``model``: itself, the stored one, or a new one.

    Raises:
        ConfigError: ``int8`` is asked for, and ``model`` is an export in float32.
        ModelUnavailableError: it cannot be exported, or there is no room.
    """
    if is_onnx_model(model.path):
        _check_precision(model.path, int8=int8)
        return model.path
    directory = stored_path(model, int8=int8, load_format=load_format)
    if is_onnx_model(directory):
        return directory
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with _locked(directory):
            if not is_onnx_model(directory):
                _export(model, directory, int8, load_format, threads, progress)
    except OSError as error:
        raise ModelUnavailableError(
            f"{model.name} cannot be exported to {directory}: {error}\n"
            "set XDG_CACHE_HOME to where there is room, or export it elsewhere: "
            "trserve export-onnx"
        ) from None
    return directory


def _check_precision(path: Path, *, int8: bool) -> None:
    if int8 and not read_manifest(path).int8:
        raise ConfigError(
            f"--quantization int8: {path} was exported in float32; export it with --int8, or name "
            "the model that it was made from"
        )


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Alone with ``directory``; the lock ends with this process, if not before."""
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    with directory.with_suffix(".lock").open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ModelUnavailableError(
                        f"another process has been exporting to {directory} for "
                        f"{LOCK_TIMEOUT_S:.0f} s; end it, or export to another directory"
                    ) from None
                time.sleep(_LOOK_EVERY_S)
        yield


def _export(
    model: ResolvedModel,
    directory: Path,
    int8: bool,
    load_format: LoadFormat,
    threads: int,
    progress: Progress | None,
) -> None:
    from trserve.edge.onnx.export import export

    # One name for each export, which the lock makes ours: what is there is one that was killed.
    made = directory.with_name(f".export-{directory.name}")
    for rest in (made, directory):
        if rest.exists():
            shutil.rmtree(rest)
    made.mkdir()
    try:
        difference = export(
            model, made, int8=int8, load_format=load_format, threads=threads, progress=progress
        )
        made.rename(directory)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    log.info("%s: exported to %s; from torch: %s", model.name, directory, difference)
