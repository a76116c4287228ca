"""How many bytes have come by a TCP connection: what a frame that takes long shows of its life.

Knows no frames and no ZeroMQ.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from typing import Final

_AT: Final = 128
"""Of ``tcpi_bytes_received`` in ``struct tcp_info`` (linux/tcp.h; RFC 4898, since Linux 4.1)."""

_COUNT: Final = struct.Struct("=Q")
_SIZE: Final = _AT + _COUNT.size


def bytes_received(fd: int) -> int:
    """Of the connection that ``fd`` is; 0 where it is none any more, or the system does not say."""
    info = b""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SIZE)
    return int(_COUNT.unpack_from(info, _AT)[0]) if len(info) == _SIZE else 0
