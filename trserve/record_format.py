"""The files of a recording: their names, headers and rows, for whoever writes or reads them.

A recording is a directory to which every run of an instance adds files of its own: for each model
``RUN.INDEX.rows``, a header and one row for each token that the model sampled, and
``RUN.INDEX.prompts``, one row for each token of the prompts; for an ``Engine`` also ``RUN.ends``,
one row for each answer that was delivered. All rows are of a fixed size and only ever appended, in
little endian, so that what a full disk or a killed process leaves is whole rows and a torn last
one.

Hidden states are float16: half the room of float32 on disk, and 11 significant bits, which is more
than bfloat16 models compute with and far below what a router trained on them can tell apart.
What lies beyond its range is stored as its largest number.

Knows no torch, no slab and no requests.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from trserve.errors import ConfigError

FORMAT_VERSION: Final = 1
HEADER_BYTES: Final = 4096
MAX_HIDDEN: Final = 65504.0
"""The largest number in float16."""

ROWS_SUFFIX: Final = ".rows"
PROMPTS_SUFFIX: Final = ".prompts"
ENDS_SUFFIX: Final = ".ends"

FINISH_REASONS: Final = ("left", "stop", "length", "abort")
"""Of an answer, by the number in its end row; ``left``: the caller went away before its end."""

PROMPT_ROW: Final = np.dtype([("request", "<u8"), ("position", "<u4"), ("token", "<i4")])
END_ROW: Final = np.dtype([("request", "<u8"), ("tokens", "<u4"), ("finish", "<u4")])

_MAGIC: Final = b"TRSVRECS"
_STATUS_AT: Final = len(_MAGIC)
_LENGTH_AT: Final = _STATUS_AT + 4
_JSON_AT: Final = _LENGTH_AT + 4
_SAMPLE_BYTES: Final = 64 * 1024


class RecordHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What the rows of one model in one run are.

    Attributes:
        run: names the run; sorts by the time of its start.
        index: of the model whose rows these are, in ``models``.
        dtype: precision of the model's weights; with ``+int8``, of those that are not quantized.
        weights: what tells them from others; see :func:`weights_digest`.
        top_k: the most probable tokens in each row.
    """

    version: int = FORMAT_VERSION
    run: str
    index: int
    models: list[str]
    dtype: str
    weights: str
    hidden_size: int
    tokenizer_size: int
    top_k: int

    @property
    def row(self) -> np.dtype[Any]:
        """One sampled token.

        ``request`` counts from 1 within the run; ``position`` is the token's index in prompt and
        output together; ``committed`` is 1 where the token became part of the answer;
        ``logit`` is the sampled token's, ``logsumexp`` that of all logits, and the logits are raw:
        before temperature, penalties and biases. ``hidden`` is the state after the final norm
        that the logits were computed from.
        """
        return np.dtype(
            [
                ("request", "<u8"),
                ("position", "<u4"),
                ("token", "<i4"),
                ("committed", "<u4"),
                ("logit", "<f4"),
                ("logsumexp", "<f4"),
                ("top_ids", "<i4", (self.top_k,)),
                ("top_logits", "<f4", (self.top_k,)),
                ("hidden", "<f2", (self.hidden_size,)),
            ]
        )

    def encode(self) -> bytes:
        """The first ``HEADER_BYTES`` of the file. Raises ConfigError if they are too few."""
        body = msgspec.json.encode(self)
        if len(body) > HEADER_BYTES - _JSON_AT:
            raise ConfigError("--record: the models' names are too long for a header")
        head = _MAGIC + bytes(4) + len(body).to_bytes(4, "little") + body
        return head.ljust(HEADER_BYTES, b"\0")

    def describes_the_same(self, other: RecordHeader) -> bool:
        """Whether rows of both may lie in one recording: they differ in the run at most."""
        return self == msgspec.structs.replace(other, run=self.run)


def new_run() -> str:
    """A name that no other run has, and that sorts behind those of earlier runs."""
    return f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(4)}"


def rows_path(directory: Path, header: RecordHeader) -> Path:
    """Where the rows of ``header`` lie."""
    return directory / f"{header.run}.{header.index}{ROWS_SUFFIX}"


def read_header(path: Path) -> RecordHeader:
    """The header of a file of rows. Raises ConfigError if it has none."""
    with path.open("rb") as file:
        head = file.read(HEADER_BYTES)
    length = int.from_bytes(head[_LENGTH_AT:_JSON_AT], "little")
    if len(head) < HEADER_BYTES or not head.startswith(_MAGIC):
        raise ConfigError(f"{path} does not begin with the header of a recording")
    try:
        header = msgspec.json.decode(head[_JSON_AT : _JSON_AT + length], type=RecordHeader)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: its header cannot be read ({error})") from None
    if header.version != FORMAT_VERSION:
        raise ConfigError(
            f"{path} has format version {header.version}; this release reads {FORMAT_VERSION}"
        )
    return header


def headers_in(directory: Path) -> list[RecordHeader]:
    """Those of all files of rows, by run and model. Raises ConfigError, OSError.

    A file that is shorter than a header holds no rows: its writer ended, or the disk was full,
    before there was one.
    """
    paths = sorted(directory.glob(f"*{ROWS_SUFFIX}"))
    return [read_header(path) for path in paths if path.stat().st_size >= HEADER_BYTES]


def read_rows(path: Path, row: np.dtype[Any], *, start: int = 0) -> NDArray[Any]:
    """The whole rows behind the first ``start`` bytes, mapped; a torn last one is left out."""
    count = (path.stat().st_size - start) // row.itemsize if path.exists() else 0
    if count <= 0:
        return np.empty(0, row)
    return np.memmap(path, row, "r", start, (count,))


def mark_stopped(fd: int) -> None:
    """Note in a header that rows are missing from here on; takes no room on a full disk."""
    os.pwrite(fd, b"\1", _STATUS_AT)


def has_stopped(path: Path) -> bool:
    """Whether :func:`mark_stopped` was called."""
    with path.open("rb") as file:
        return file.read(_STATUS_AT + 1)[_STATUS_AT:] == b"\1"


def open_rows(path: Path, row: np.dtype[Any], head: bytes = b"") -> int:
    """A descriptor that stands behind the last whole row of ``path``, made with ``head`` if new.

    A torn row, left by a writer that was killed, is cut off. Raises OSError.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    size = os.fstat(fd).st_size
    if size < len(head):
        os.ftruncate(fd, 0)
        write_all(fd, head)
        return fd
    end = len(head) + (size - len(head)) // row.itemsize * row.itemsize
    os.ftruncate(fd, end)
    os.lseek(fd, end, os.SEEK_SET)
    return fd


def write_all(fd: int, data: bytes | NDArray[Any]) -> None:
    """Write all of ``data``; contiguous rows are taken as their bytes. Raises OSError."""
    view = memoryview(data) if isinstance(data, bytes) else data.view(np.uint8).data
    while view:
        view = view[os.write(fd, view) :]


def weights_digest(path: Path) -> str:
    """What tells two checkpoints apart, cheaply and wherever they lie.

    Args:
        path: a checkpoint directory or a file. Of its configuration and weights, the names, the
            sizes, and the first and last 64 KiB count.
    """
    files = [path]
    if path.is_dir():
        files = sorted(f for f in path.iterdir() if f.suffix in (".safetensors", ".gguf"))
        files.append(path / "config.json")
    digest = hashlib.blake2b(digest_size=8)
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as opened:
            digest.update(opened.read(_SAMPLE_BYTES))
            opened.seek(max(0, size - _SAMPLE_BYTES))
            digest.update(opened.read())
    return digest.hexdigest()
