"""The two ends of a front server under load, as processes of their own: a group and clients.

``python -m bench.fleet_ends group CHUNKS`` streams so many events to whoever asks, as one write
each, and prints its address; ``clients URL STREAMS`` reads as many streams at once to their end
and prints how many events came. Knows nothing of what is between them.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Final

from aiohttp import ClientSession, ClientTimeout, web

EVENT: Final = (
    b'data: {"id":"cmpl-0123456789abcdef","object":"text_completion","created":1700000000,'
    b'"model":"trserve","choices":[{"index":0,"text":" token","logprobs":null,'
    b'"finish_reason":null}]}\n\n'
)
PACE_S: Final = 0.006
"""Between two events of a stream: a step of the reference system's small model."""

_TIMEOUT_S: Final = 120.0


async def _group(chunks: int) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path == "/readyz":
            return web.json_response({"detail": "serving"})
        reply = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await reply.prepare(request)
        for _ in range(chunks):
            await asyncio.sleep(PACE_S)
            await reply.write(EVENT)
        return reply

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    print(f"http://{host}:{port}", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    await runner.cleanup()


async def _clients(url: str, streams: int) -> None:
    async def read(session: ClientSession, number: int) -> int:
        body = {"prompt": f"{number}", "stream": True}
        async with session.post(url + "/v1/completions", json=body) as reply:
            return (await reply.read()).count(b"data: ")

    async with ClientSession(timeout=ClientTimeout(total=_TIMEOUT_S)) as session:
        counts = await asyncio.gather(*(read(session, number) for number in range(streams)))
    print(sum(counts), flush=True)


def main() -> None:
    """See the module."""
    role, first, *rest = sys.argv[1:]
    asyncio.run(_group(int(first)) if role == "group" else _clients(first, int(rest[0])))


if __name__ == "__main__":
    main()
