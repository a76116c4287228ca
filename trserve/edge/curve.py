"""Keys of links between hosts: their files, CURVE on a socket, and who is let in.

A server's file holds its key pair and the public keys of the clients that it lets in, one a line; a
client's holds its own pair and the server's public key. Keys are hexadecimal, 32 bytes. Knows no
frames and no sessions. A message never shows a secret.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import zmq
from zmq.utils import z85

from trserve.errors import ConfigError
from trserve.limited_log import LimitedLog

log = logging.getLogger(__name__)
_ZAP: Final = "inproc://zeromq.zap.01"
_VERSION: Final = b"1.0"
_KEY_BYTES: Final = 32
_SHOWN: Final = 8


def fingerprint(public: bytes) -> str:
    """What people are shown of a public key."""
    return public.hex()[: 2 * _SHOWN]


@dataclass(frozen=True)
class KeyPair:
    """A CURVE key pair, 32 bytes each."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def new(cls) -> KeyPair:
        """A fresh one."""
        public, secret = zmq.curve_keypair()
        return cls(z85.decode(public), z85.decode(secret))


@dataclass(frozen=True)
class ServerKeys:
    """What listens: ``clients`` are the names of those that are let in, by public key."""

    pair: KeyPair
    clients: Mapping[bytes, str]


@dataclass(frozen=True)
class ClientKeys:
    """What dials: its pair, and the public key of whom it dials."""

    pair: KeyPair
    server: bytes


def read_server_keys(path: str) -> ServerKeys:
    """The server's file. ConfigError, naming ``--edge-keys``, if it is none."""
    lines = _read(path, "server")
    clients: dict[bytes, str] = {}
    for name, rest in lines:
        if name == "client":
            key, _, label = rest.partition(" ")
            clients[_key(path, key)] = label.strip() or fingerprint(_key(path, key))
    if not clients:
        raise ConfigError(
            f"--edge-keys {path}: lets nobody in; `trserve keys edge {path} CLIENT_FILE` adds one"
        )
    return ServerKeys(_pair(path, lines), clients)


def read_client_keys(path: str) -> ClientKeys:
    """The client's file. ConfigError, naming ``--edge-keys``, if it is none."""
    lines = _read(path, "client")
    return ClientKeys(_pair(path, lines), _key(path, _one(path, lines, "server")))


def write_server_keys(path: Path, keys: ServerKeys) -> None:
    """Write or replace the server's file, for its owner only."""
    lines = ["# Edge keys of the side that listens. Keep this file secret.", "role server"]
    lines += [f"public {keys.pair.public.hex()}", f"secret {keys.pair.secret.hex()}"]
    lines += [f"client {key.hex()} {name}" for key, name in keys.clients.items()]
    _write(path, lines)


def write_client_keys(path: Path, keys: ClientKeys) -> None:
    """Write the client's file, for its owner only."""
    lines = ["# Edge keys of the side that dials. Keep this file secret.", "role client"]
    lines += [f"public {keys.pair.public.hex()}", f"secret {keys.pair.secret.hex()}"]
    _write(path, [*lines, f"server {keys.server.hex()}"])


def _write(path: Path, lines: list[str]) -> None:
    fresh = path.with_name(f".{path.name}.new")
    fresh.unlink(missing_ok=True)
    # Never readable by others, not even for a moment; and whole or not there at all.
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "w", encoding="ascii", errors="replace") as file:
        file.write("\n".join(lines) + "\n")
    fresh.rename(path)


def _read(path: str, role: str) -> list[tuple[str, str]]:
    if not path:
        raise ConfigError(
            "--edge-keys FILE: a link between hosts needs keys; `trserve keys edge SERVER_FILE "
            "CLIENT_FILE` makes both sides'"
        )
    file = Path(path).expanduser()
    try:
        shared = stat.S_IMODE(file.stat().st_mode) & 0o077
        text = file.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is no text"
        raise ConfigError(f"--edge-keys {path}: {reason}") from None
    if shared:
        raise ConfigError(f"--edge-keys {path}: others may read it; chmod 600 {path}")
    split = (line.strip().partition(" ") for line in text.splitlines())
    lines = [(name, rest.strip()) for name, _, rest in split if name and not name.startswith("#")]
    found = dict(lines).get("role", "")
    if found != role:
        other = f"is the {found}'s" if found in ("server", "client") else "is no file of edge keys"
        raise ConfigError(f"--edge-keys {path}: {other}; this side needs the {role}'s")
    return lines


def _one(path: str, lines: list[tuple[str, str]], name: str) -> str:
    found = [rest for each, rest in lines if each == name]
    if len(found) != 1:
        raise ConfigError(f"--edge-keys {path}: has {len(found)} lines {name!r}, not one")
    return found[0]


def _key(path: str, text: str) -> bytes:
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != _KEY_BYTES:
        raise ConfigError(f"--edge-keys {path}: a key that is not 64 hexadecimal digits")
    return key


def _pair(path: str, lines: list[tuple[str, str]]) -> KeyPair:
    secret = _key(path, _one(path, lines, "secret"))
    if z85.decode(zmq.curve_public(z85.encode(secret))) != _key(path, _one(path, lines, "public")):
        raise ConfigError(f"--edge-keys {path}: its public and secret keys are of two pairs")
    return KeyPair(_key(path, _one(path, lines, "public")), secret)


def secure_client(socket: zmq.Socket[bytes], keys: ClientKeys) -> None:
    """Have ``socket`` speak CURVE, and with that server alone."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, z85.encode(keys.server))
    socket.setsockopt(zmq.CURVE_PUBLICKEY, z85.encode(keys.pair.public))
    socket.setsockopt(zmq.CURVE_SECRETKEY, z85.encode(keys.pair.secret))


def secure_server(socket: zmq.Socket[bytes], keys: ServerKeys) -> None:
    """Have ``socket`` speak CURVE, and let in whom a :class:`Gatekeeper` lets in."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, z85.encode(keys.pair.secret))
    socket.setsockopt(zmq.ZAP_DOMAIN, b"edge")


class Gatekeeper:
    """Decides, in this process, who is let in: ZeroMQ asks by its ZAP (RFC 27).

    Must be there before the socket that it guards is bound.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: ServerKeys) -> None:
        self._clients = keys.clients
        self._barred: dict[str, float] = {}
        self._strangers, self._unruly = LimitedLog(log), LimitedLog(log)
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(_ZAP)

    @property
    def fd(self) -> int:
        """Readable when somebody knocks."""
        return int(self._socket.getsockopt(zmq.FD))

    def name_of(self, user: str) -> str:
        """What to call the client whose public key is ``user``, in hexadecimal digits."""
        return self._clients.get(bytes.fromhex(user), "?")

    def bar(self, user: str, until: float) -> None:
        """Let the client of that key not in again before ``until`` (monotonic seconds)."""
        self._barred[user] = until

    def decide_all(self, now: float) -> None:
        """Answer everybody who knocks."""
        while True:
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._socket.send_multipart(self._decide(parts, now))

    def _decide(self, parts: list[bytes], now: float) -> list[bytes]:
        number = parts[1] if len(parts) > 1 else b""
        key = parts[6] if len(parts) == 7 and parts[5] == b"CURVE" else b""
        address = parts[3].decode("ascii", "replace") if len(parts) > 3 else "?"
        name = self._clients.get(key)
        if name is not None and self._barred.get(key.hex(), 0.0) <= now:
            return [_VERSION, number, b"200", b"OK", key.hex().encode(), b""]
        if name is None:
            why = f"its key {fingerprint(key)} is not in --edge-keys"
        else:
            why = f"{name} sent frames that are none, and is barred for a while"
        lines = self._strangers if name is None else self._unruly
        lines.warning(now, "%s is refused: %s", address, why)
        return [_VERSION, number, b"400", b"refused", b"", b""]

    def close(self) -> None:
        """Let nobody in any more."""
        self._socket.close()
