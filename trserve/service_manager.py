"""What a service manager is told of a server: that it is ready, and that it stops (sd_notify).

The protocol is one datagram of ``NAME=value`` lines to the socket that ``NOTIFY_SOCKET`` names;
systemd reads it with ``Type=notify``, and so do some container runtimes. Knows no server.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import MutableMapping
from typing import Final

log = logging.getLogger(__name__)
VARIABLE: Final = "NOTIFY_SOCKET"
_TIMEOUT_S: Final = 1.0


class ServiceManager:
    """The one that started this process; ``address`` None: nobody listens."""

    def __init__(self, address: str | None) -> None:
        # A leading @ stands for the abstract namespace, whose names begin with a zero byte.
        self._address = "\0" + address[1:] if address and address[0] == "@" else address

    @classmethod
    def of(cls, environment: MutableMapping[str, str]) -> ServiceManager:
        """Who ``environment`` names. The variable is removed: children have nothing to say."""
        return cls(environment.pop(VARIABLE, None) or None)

    def tell(self, **values: str) -> None:
        """Send ``NAME=value`` lines. One who does not listen is no reason to stop serving."""
        if self._address is None:
            return
        message = "\n".join(f"{name}={value}" for name, value in values.items())
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.settimeout(_TIMEOUT_S)
                sender.sendto(message.encode(), self._address)
        except OSError as error:
            log.warning("%s: the service manager was not told %s: %s", VARIABLE, values, error)
