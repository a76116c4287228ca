"""The raw client against a server that sends prepared bytes in prepared pieces."""

import asyncio

import pytest

from bench.http_client import Connection, HttpError, content_length, encode

WHOLE = b"HTTP/1.1 200 OK\r\ncontent-type: a/b\r\nContent-Length: 5\r\n\r\nhello"
STREAM = (
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    b"9\r\ndata: a\n\n\r\n"
    b"e\r\ndata: [DONE]\n\n\r\n"
    b"0\r\n\r\n"
)
REFUSED = b"HTTP/1.1 400 Bad Request\r\ncontent-length: 3\r\n\r\nbad"


async def talk(pieces, ask):
    """``ask`` of a connection to a server that answers every request with ``pieces``."""

    async def answer(reader, writer):
        while await reader.read(65536):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.002)
            if b"" in pieces:
                writer.close()
                return

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    connection = await Connection.open(*server.sockets[0].getsockname())
    try:
        return await ask(connection)
    finally:
        connection.close()
        server.close()


def cut(data, size):
    return [data[i : i + size] for i in range(0, len(data), size)]


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_whole_answer_in_any_pieces_twice_on_one_connection(size):
    async def ask(connection):
        return [await connection.exchange(encode("GET", "/"), 10.0) for _ in range(2)]

    assert asyncio.run(talk(cut(WHOLE, size), ask)) == [b"hello", b"hello"]


@pytest.mark.parametrize("size", [1, 9, 1000])
def test_a_stream_in_any_pieces(size):
    begun = []

    async def ask(connection):
        return [await connection.stream(encode("POST", "/"), 10.0, begun.append) for _ in range(2)]

    for tail in asyncio.run(talk(cut(STREAM, size), ask)):
        assert tail.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert len(begun) == 2


@pytest.mark.parametrize("streams", [False, True])
def test_a_refusal_is_an_error_with_its_words(streams):
    async def ask(connection):
        if streams:
            await connection.stream(encode("POST", "/"), 10.0, lambda at: None)
        else:
            await connection.exchange(encode("POST", "/"), 10.0)

    with pytest.raises(HttpError, match="status 400: bad"):
        asyncio.run(talk([REFUSED], ask))


def test_a_connection_that_ends_amid_an_answer_is_an_error():
    async def ask(connection):
        await connection.exchange(encode("GET", "/"), 10.0)

    with pytest.raises(HttpError, match="closed the connection"):
        asyncio.run(talk([WHOLE[:20], b""], ask))


def test_a_server_that_says_nothing_is_waited_for_so_long_and_no_longer():
    async def ask(connection):
        await connection.exchange(encode("GET", "/"), 0.05)

    with pytest.raises(TimeoutError):
        asyncio.run(talk([], ask))


def test_lengths():
    assert content_length(b"HTTP/1.1 200 OK\r\nContent-Length: 12\r\nx: y") == 12
    assert content_length(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked") is None
