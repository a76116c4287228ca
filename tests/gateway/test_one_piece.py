"""What leaves in one piece, and what must not wait."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.test_http import Gateway, get, play, request
from trserve.gateway.one_piece import OnePiece

HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n"


class Transport:
    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(
    ("pieces", "written"),
    [
        ([HEAD, b"{}"], [HEAD + b"{}"]),
        ([HEAD, b""], [HEAD]),
        ([HEAD, b"{", b"}"], [HEAD + b"{", b"}"]),
        ([b"HTTP/1.1 100 Continue\r\n\r\n", HEAD, b"{}"], [None, HEAD + b"{}"]),
        ([b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", b"x"], [None, b"x"]),
        # A body that looks like a head.
        ([HEAD, HEAD], [HEAD + HEAD]),
    ],
)
def test_a_head_with_a_length_waits_for_the_body(
    pieces: list[bytes], written: list[bytes | None]
) -> None:
    transport: Any = Transport()
    response = OnePiece(transport)
    for piece in pieces:
        response.write(piece)
    expected = [piece if piece is not None else pieces[n] for n, piece in enumerate(written)]
    assert transport.written == expected


def test_a_whole_answer_is_one_write_and_head_asks_for_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[bytes] = []

    def noted(self: OnePiece, transport: asyncio.Transport) -> None:
        self._transport, self._held = transport, b""
        self.write_past = lambda data: (written.append(data), transport.write(data))[1]

    monkeypatch.setattr(OnePiece, "__init__", noted)

    async def story(g: Gateway) -> None:
        reader, writer = await g.connect()
        for _ in range(2):  # on the same connection
            writer.write(request())
            await g.until(lambda: g.dispatcher.num_live == 1)
            g.work(8)
            await reader.readuntil(b"\r\n\r\n")
            await g.check_nothing_left()
        assert len(written) == 2 and all(b'"text":"AAAAAA"' in each for each in written)
        writer.close()
        assert (await get(g, "/livez"))[0] == 200
        reader, writer = await g.connect()
        writer.write(b"HEAD /livez HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        head = await reader.read()
        assert head.startswith(b"HTTP/1.1 200") and head.endswith(b"\r\n\r\n")
        writer.close()
        assert len(written) == 3

    play(story, tmp_path)
