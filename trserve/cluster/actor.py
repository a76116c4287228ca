"""The actor that Ray places: one group of workers, as a server on the actor's host.

Ray restarts the actor when its process or host is lost; the actor restarts the server when that
ends. Knows no other groups and no requests. Imports no ray: the caller makes an actor of the class.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any, Final

from trserve.cluster.group_process import GroupProcess, Status
from trserve.cluster.relay import Relay
from trserve.ipc.owned_directory import OwnedDirectory, sweep_dead

FOLDER: Final = "{folder}"
"""In arguments and files, stands for the private directory of the files that came along."""

HOST: Final = "{host}"
"""Stands for the address of the actor's host."""

PORT: Final = "{port}"
"""Stands for a free port of it."""


def peer(number: int) -> str:
    """Stands for where member ``number`` of the same replica can be dialled."""
    return f"{{peer-{number}}}"


class GroupActor:
    """A server that runs while the actor lives.

    Args:
        arguments: of ``trserve``. They, the environment and the files have :data:`FOLDER`,
            :data:`HOST`, :data:`PORT` and :func:`peer` in the place of what only the actor knows.
        environment: what the server gets beside the actor's own.
        files: by name, the content of files that only this user may read.
        members: which members it dials; the server starts once it was told where they are.
        address: of this host, as the others reach it.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        files: Mapping[str, str],
        members: Sequence[int] = (),
        address: str = "",
    ) -> None:
        self._address, self._node = (address, "") if address else where_we_are()
        self._port = _free_port(self._address)
        prefix = f"trserve-group-{os.getuid()}-"
        sweep_dead(prefix)  # what actors left here that were killed has keys in it
        self._owned = OwnedDirectory(prefix)
        self._folder = self._owned.path
        self._relays = {number: Relay() for number in members}
        self._unknown = set(members)
        for name, content in files.items():
            descriptor = os.open(self._folder / name, os.O_WRONLY | os.O_CREAT, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(self._filled(content))
        own = {name: self._filled(value) for name, value in environment.items()}
        self._process = GroupProcess(list(map(self._filled, arguments)), own)

    def _filled(self, text: str) -> str:
        known = {FOLDER: str(self._folder), HOST: self._address, PORT: str(self._port)}
        known |= {peer(n): f"127.0.0.1:{relay.port}" for n, relay in self._relays.items()}
        for name, value in known.items():
            text = text.replace(name, value)
        return text

    def connect(self, number: int, address: str, port: int) -> None:
        """Member ``number`` is there from now on."""
        self._relays[number].connect(address, port)
        self._unknown.discard(number)

    def status(self) -> dict[str, Any]:
        """How the group is, see ``group_process.Status``, and where; starts it if that is due."""
        status = Status("", "", "waits for the other hosts")
        if not self._unknown:
            status = self._process.tick()
        place = {"address": self._address, "port": self._port, "node": self._node}
        return {**status._asdict(), **place}

    def stop(self, drain_s: float) -> int | None:
        """Drain the group and end it; its exit code."""
        code = self._process.stop(drain_s)
        self._owned.remove()
        return code


def _free_port(address: str) -> int:
    """A port that nobody listens on now; who takes it before we do makes the server fail once."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def where_we_are() -> tuple[str, str]:
    """This host's address, as Ray knows it, and the name that Ray gives the host."""
    import ray

    return str(ray.util.get_node_ip_address()), str(ray.get_runtime_context().get_node_id())
