"""What two hosts say of themselves before any token travels, and whether they go together.

Once a connection, in msgpack. Everything that could make the tokens of two hosts differ from those
of one is compared here, and named where it does not fit. Knows no sockets and no sessions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from trserve import __version__
from trserve.edge.facts import RemoteFacts
from trserve.edge.wire import GREETING_BYTES, PROTOCOL_VERSION, FrameError, FrameType
from trserve.gateway.tokenizer import Tokenizer

if TYPE_CHECKING:
    from trserve.plan import ServerPlan

MAX_MODELS: Final = 64
MAX_SHOWN: Final = 800
UNNAMED: Final = "cloud"
"""What a home calls a far model whose name nobody told it."""

T = TypeVar("T")


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """What one host says of itself.

    ``protocol`` comes first and stays where it is, so that any two versions can say that they
    differ. ``router_texts`` are the router's values that a request cannot set, files by their
    content. ``heartbeat_s``: how long it is silent at most.
    """

    protocol: int
    software: str
    models: list[str]
    router: str
    router_texts: dict[str, str]
    vocabulary: str
    tokenizer_size: int
    heartbeat_s: float


class _AnySide(msgspec.Struct):
    protocol: int


class _Versioned(msgspec.Struct):
    side: _AnySide


class Hello(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Of whoever dials.

    ``instance`` tells a server from every other, and survives its agent; ``model`` is the index of
    the model that it wants, whose rows it lets grow to ``max_model_len``; ``nccl`` what could carry
    ids beside the connection, empty for nothing.
    """

    side: Side
    instance: bytes
    model: int
    max_model_len: int
    nccl: str = ""


class Welcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Of whoever listens; sessions of another ``instance`` are gone.

    ``nccl`` is the hello's if that will carry ids; else it is empty and ``no_nccl`` says why.
    """

    instance: bytes
    facts: RemoteFacts
    nccl: str = ""
    no_nccl: str = ""


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """Of a server that is still being planned: what of ``model``, of so many ``models``?"""

    protocol: int
    model: int
    models: int


def describe(plan: ServerPlan, heartbeat_s: float) -> Side:
    """What the server of ``plan`` says of itself. Reads the tokenizer and the router's files."""
    texts = {n: v for n, v in plan.router_config.items() if isinstance(v, str)}
    return Side(
        protocol=PROTOCOL_VERSION,
        software=__version__,
        models=[model.name for model in plan.models],
        router=plan.router,
        router_texts={name: _content(text) for name, text in texts.items()},
        vocabulary=Tokenizer.load(Path(plan.tokenizer_path)).fingerprint(),
        tokenizer_size=plan.tokenizer_size,
        heartbeat_s=heartbeat_s,
    )


def _content(text: str) -> str:
    """``text``, or what stands for the file that it names; folders are elsewhere on each host."""
    path = Path(text).expanduser()
    if path.is_dir():
        return "a folder"
    if not text or not path.is_file():
        return text
    return "a file, SHA-256 " + hashlib.sha256(path.read_bytes()).hexdigest()


def canonical(name: str) -> str:
    """What two spellings of one model have in common: an alias, a hub id or a path's last part."""
    return name.rstrip("/").rpartition("/")[2].removesuffix(".gguf").lower()


def mismatch(hello: Hello, own: Side, facts: Sequence[RemoteFacts | None]) -> str | None:
    """Why whoever said ``hello`` cannot be served; None if it can.

    Args:
        facts: of each model; None for those that are not here.
    """
    theirs = hello.side
    if theirs.protocol != own.protocol:
        return (
            f"it speaks version {theirs.protocol} of the link's protocol (trserve "
            f"{theirs.software}), this side version {own.protocol} (trserve {own.software})"
        )
    if len(theirs.models) != len(own.models):
        return f"it has the models {_list(theirs.models)}, this side {_list(own.models)}"
    if not 0 <= hello.model < len(facts):
        return f"it wants model {hello.model} of {len(facts)}"
    fact = facts[hello.model]
    if fact is None:
        return f"it wants model {hello.model}, which is a placeholder here ({_list(own.models)})"
    for index, each in enumerate(facts):
        if each and not _same(theirs.models[index], own.models[index]):
            return (
                f"its model {index} is {theirs.models[index]!r}, this side's is "
                f"{own.models[index]!r}; the order of --models counts"
            )
    if theirs.router != own.router:
        return f"its --router is {theirs.router}, this side's is {own.router}"
    for name in sorted({*theirs.router_texts, *own.router_texts}):
        if theirs.router_texts.get(name) != own.router_texts.get(name):
            return f"the two sides differ in --router-config {name}"
    if (theirs.vocabulary, theirs.tokenizer_size) != (own.vocabulary, own.tokenizer_size):
        return (
            f"its vocabulary ({theirs.tokenizer_size} ids) is not this side's "
            f"({own.tokenizer_size} ids): the same id must mean the same text"
        )
    if hello.max_model_len > fact.max_model_len:
        return (
            f"its rows grow to {hello.max_model_len} tokens, this side's to "
            f"{fact.max_model_len}: start it with --max-model-len {fact.max_model_len}"
        )
    return None


def _same(theirs: str, own: str) -> bool:
    return theirs == UNNAMED or canonical(theirs) == canonical(own)


def printable(text: str) -> str:
    """``text`` of another host as one line of a log, of bounded length."""
    shown = "".join(c if c.isprintable() else "?" for c in text[:MAX_SHOWN])
    return shown if len(text) <= MAX_SHOWN else shown + "..."


def _list(names: Sequence[str]) -> str:
    return ",".join(names)


# -- frames --------------------------------------------------------------------------------------


def encode(kind: FrameType, content: msgspec.Struct | str) -> bytes:
    """A frame of the greeting: a struct of this file, or the text of a refusal."""
    return bytes((kind,)) + msgspec.msgpack.encode(content)


def protocol_of(frame: bytes) -> int | None:
    """The version that a HELLO names, whatever else is in it; None if it names none."""
    try:
        return msgspec.msgpack.decode(frame[1:GREETING_BYTES], type=_Versioned).side.protocol
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None


def decode(frame: bytes, kind: type[T]) -> T:
    """The inverse. FrameError if it is not of ``kind``, or too long."""
    if len(frame) > GREETING_BYTES:
        raise FrameError("a greeting that is too long")
    try:
        found = msgspec.msgpack.decode(frame[1:], type=kind)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise FrameError(f"no {kind.__name__}: {error}") from None
    if isinstance(found, Hello) and len(found.side.models) > MAX_MODELS:
        raise FrameError("a greeting with too many models")
    return found
