"""The client against made-up servers: streams in any pieces, refusals, ends amid answers."""

import asyncio
import json

import pytest

from bench.serve_asks import Ask
from bench.serve_load import GIVE_UP, Load, closed_loop, open_loop
from bench.serve_metrics import row_of
from bench.serve_target import CHAT, Target, read_key, read_url

HEAD = b"HTTP/1.1 200 OK\r\nx-trserve-router: r2r\r\ntransfer-encoding: chunked\r\n\r\n"
ASK = Ask([20, 21], 3, True, 2)


def event(**body):
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def text(*parts):
    return [event(choices=[{"text": part}], usage=None) for part in parts]


USAGE = event(choices=[], usage={"completion_tokens": 4, "prompt_tokens": 2})
DONE = b"data: [DONE]\n\n"


def chunked(*pieces):
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


async def served(answer, use):
    """``use`` of a target whose server has ``answer(number, writer)`` reply to each request."""
    bodies = []

    async def handle(reader, writer):
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                bodies.append((head, json.loads(await reader.readexactly(length))))
                await answer(len(bodies), writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    try:
        return await use(Target(host, port, "/v1", model="m", key="k")), bodies
    finally:
        server.close()


def asked(answer, count=1, users=1, ask=ASK, timeout_s=5.0, **target):
    """The answers to ``count`` requests of a closed loop, and what the server was sent."""

    async def use(made):
        load = Load(Target(**{**vars(made), **target}), timeout_s, lambda answer: None)
        await closed_loop(load, iter([ask] * count), users)
        load.close()
        return load.answers

    return asyncio.run(served(answer, use))


def replies(data, size=10**6, pause_s=0.0):
    async def answer(number, writer):
        for at in range(0, len(data), size):
            writer.write(data[at : at + size])
            await writer.drain()
            await asyncio.sleep(pause_s)

    return answer


@pytest.mark.parametrize("size", [1, 37, 10**6])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_a_stream_in_any_pieces(size, end):
    role = event(choices=[{"delta": {"role": "assistant", "content": ""}}])
    parts = [b": comment\n\n", role, *text("a", "b"), *text("", "c"), USAGE, DONE]
    data = HEAD + chunked(*(part.replace(b"\n", end) for part in parts))
    (found,), _ = asked(replies(data, size))
    assert found.error is None and len(found.text_s) == 3 and found.router == "r2r"
    assert found.sent_s < found.text_s[0] <= found.text_s[-1] <= found.ended_s
    assert row_of([found])["tokens"] == 4


def test_events_are_stamped_when_they_come():
    async def answer(number, writer):
        writer.write(HEAD)
        for part in (*text("a", "b", "c"), DONE):
            writer.write(b"%x\r\n%s\r\n" % (len(part), part))
            await asyncio.sleep(0.03)
        writer.write(b"0\r\n\r\n")

    (found,), _ = asked(answer)
    row = row_of([found])
    assert len(found.text_s) == 3 and 25 < row["mean_itl_ms"] < 500
    assert row["mean_e2e_ms"] - row["ttft_ms"] == pytest.approx(2 * row["mean_itl_ms"])


def test_events_in_one_chunk_and_cut_over_two():
    whole = b"".join([*text("a", "b"), USAGE, DONE])
    (found,), _ = asked(replies(HEAD + chunked(whole[:50], whole[50:])))
    assert found.error is None and len(found.text_s) == 2


def test_a_stream_that_ends_with_its_connection():
    async def answer(number, writer):
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + b"".join([*text("a"), DONE]))
        writer.close()

    found, _ = asked(answer, count=2)
    assert [each.error for each in found] == [None, None]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (
            HEAD + chunked(*text("a"), event(error={"code": "lost", "message": "x"}), DONE),
            "lost: x",
        ),
        (HEAD + chunked(*text("a")), "without [DONE]"),
        (HEAD + chunked(DONE), "without a choice"),
        (HEAD + chunked(b"data: {1}\n\n", DONE), "none of OpenAI's"),
        (HEAD + chunked(event(choices=[5]), DONE), "none of OpenAI's"),
        (b"HTTP/1.1 429 Too Many\r\ncontent-length: 4\r\n\r\nbusy", "http status 429: busy"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", "no stream but a body"),
    ],
)
def test_what_is_no_whole_answer_failed(data, said):
    found, _ = asked(replies(data), count=2)
    row = row_of(found)
    assert row["failed"] == 2 and row["completed"] == 0
    (error,) = row["errors"]
    assert said in error


def test_a_cut_stream_and_a_silent_server_failed():
    async def cut(number, writer):
        writer.write(HEAD + chunked(*text("a"))[:-5])
        await writer.drain()
        writer.close()

    async def silent(number, writer):
        await asyncio.sleep(0.3)

    assert "closed the connection" in asked(cut)[0][0].error
    assert "no whole answer within 0.05 s" in asked(silent, timeout_s=0.05)[0][0].error


def test_a_connection_closed_while_idle_is_no_failure():
    whole = HEAD + chunked(*text("a"), DONE)

    async def answer(number, writer):
        if number == 2:
            writer.close()  # as if it had been idle for too long
            return
        writer.write(whole)

    found, bodies = asked(answer, count=2)
    assert [each.error for each in found] == [None, None] and len(bodies) == 3


def test_a_server_that_is_not_there_is_not_asked_for_ever():
    async def run():
        load = Load(Target("127.0.0.1", 9, "/v1", model="m"), 1.0, lambda answer: None)
        await closed_loop(load, iter([ASK] * 10**6), 2)
        return load.answers

    found = asyncio.run(run())
    assert GIVE_UP <= len(found) <= GIVE_UP + 2 and "no connection" in found[0].error


def test_an_open_loop_sends_at_its_times_however_many_are_open():
    slow = HEAD + chunked(*text("a"), DONE)

    async def answer(number, writer):
        await asyncio.sleep(0.3)
        writer.write(slow)

    def run(most):
        async def use(target):
            load = Load(target, 5.0, lambda answer: None)
            await open_loop(load, [(0.05 * i, ASK) for i in range(4)], most)
            return load.answers

        return row_of(asyncio.run(served(answer, use))[0])

    free, held = run(None), run(1)
    assert free["completed"] == held["completed"] == 4
    # One after the other the last waits for three, each of 0.3 s; else for nobody.
    assert held["p99_late_ms"] > 500 and held["seconds"] > 1.1
    assert free["p99_late_ms"] < held["p99_late_ms"] / 2 and free["seconds"] > 0.4


def test_what_is_sent():
    whole = replies(HEAD + chunked(*text("a"), DONE))
    _, ((head, body),) = asked(whole)
    assert head.startswith(b"POST /v1/completions ") and b"authorization: Bearer k\r\n" in head
    assert body["prompt"] == [20, 21] and body["max_tokens"] == 3 and body["ignore_eos"] is True
    assert body["stream_options"] == {"include_usage": True} and body["model"] == "m"
    one, other = (
        asked(whole, ask=Ask(ids, 3, False), endpoint=CHAT, extra={"n": 1, "temperature": None})[1][
            0
        ]
        for ids in ([20, 21, 22], [20, 21, 30])
    )
    assert one[0].startswith(b"POST /v1/chat/completions ") and "ignore_eos" not in one[1]
    words, others = (each[1]["messages"][0]["content"].split() for each in (one, other))
    assert words[:2] == others[:2] and words[2] != others[2] and one[1]["n"] == 1
    assert "temperature" not in one[1] and body["temperature"] == 0


def test_addresses_and_keys(monkeypatch):
    assert read_url("http://h:81") == ("h", 81, "/v1", None)
    assert read_url("http://h/api/v1/")[:3] == ("h", 80, "/api/v1")
    host, port, _, tls = read_url("https://h")
    assert (host, port) == ("h", 443) and tls is not None
    with pytest.raises(SystemExit, match="--url"):
        read_url("h:80")
    monkeypatch.setenv("SOME_KEY", "a b")
    with pytest.raises(SystemExit, match="SOME_KEY: a key has no spaces"):
        read_key("SOME_KEY")
    monkeypatch.delenv("SOME_KEY")
    assert read_key("SOME_KEY") is None
