"""A network between two ends of TCP connections: delay, jitter, stalls, outages, in order.

``python -m bench.netproxy --to HOST:PORT --delay-ms 85 --jitter-ms 5 --stall-chance 0.01`` listens,
says where, and takes commands from standard input, one a line, each answered with a line of JSON:
``outage SECONDS``, ``cut``, ``restore``, ``reset``, ``counts``, ``log``, ``weather {...}``.
It ends with its standard input. ``--check`` measures its delay in each direction instead, and fails
where that is off by more than 2 ms.

From Python :class:`NetProxy` is the same in a process of its own, so that nobody who computes holds
up a packet. ``netproxy_weather`` says what the way does; this file knows flags and commands.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Final, TypeVar

from bench.netproxy_check import check, loop_factory
from bench.netproxy_path import Counts, Relay
from bench.netproxy_weather import Weather

READY_TIMEOUT_S: Final = 20.0
ANSWER_TIMEOUT_S: Final = 10.0
_ROOT: Final = Path(__file__).parent.parent
_READY: Final = "netproxy ready "

T = TypeVar("T")


class NetProxy:
    """A proxy in a process of its own; a context manager, for any thread.

    Args:
        target: ``(host, port)`` of the server.
        prefix: words before the command, such as ``nsenter`` with its flags.

    Attributes:
        host, port: where it listens.
    """

    def __init__(
        self,
        target: tuple[str, int],
        weather: Weather,
        *,
        listen: tuple[str, int] = ("127.0.0.1", 0),
        prefix: Sequence[str] = (),
    ) -> None:
        if problem := weather.problem():
            raise ValueError(problem)
        place = [f"--to={_joined(target)}", f"--listen={_joined(listen)}"]
        self._command = [*prefix, sys.executable, "-m", "bench.netproxy", *place]
        self._command += ["--weather", json.dumps(asdict(weather))]
        self.host, self.port = listen
        self._one = threading.Lock()

    def __enter__(self) -> NetProxy:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=_ROOT
        )
        try:
            ready = _within(READY_TIMEOUT_S, self._line)
            if not ready.startswith(_READY):
                raise RuntimeError(f"the proxy did not start: {ready!r}")
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise
        self.port = int(ready.rpartition(":")[2])
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(ANSWER_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    @property
    def address(self) -> str:
        """``HOST:PORT``, where it listens."""
        return f"{self.host}:{self.port}"

    def outage(self, seconds: float) -> None:
        """From now on nothing arrives for so long, in neither direction; connections stay."""
        self._tell(f"outage {seconds!r}")

    def cut(self) -> None:
        """Reset all connections, and every new one, until :meth:`restore`."""
        self._tell("cut")

    def restore(self) -> None:
        """New connections are let through again."""
        self._tell("restore")

    def reset(self) -> None:
        """Reset all connections, once."""
        self._tell("reset")

    def set_weather(self, weather: Weather) -> None:
        """For whatever is sent from now on; outages begin to count at the start all the same."""
        if problem := weather.problem():
            raise ValueError(problem)
        self._tell(f"weather {json.dumps(asdict(weather))}")

    def counts(self) -> Counts:
        """What went by since the start."""
        return Counts(**self._tell("counts"))

    def log(self) -> list[tuple[float, bool, int]]:
        """(moment, whether up, bytes) of each read since the last look; the latest 16,384."""
        return [(at, up, size) for at, up, size in self._tell("log")["log"]]

    def _tell(self, command: str) -> Any:
        assert self._process.stdin is not None
        with self._one:
            self._process.stdin.write(f"{command}\n")
            self._process.stdin.flush()
            answer = json.loads(_within(ANSWER_TIMEOUT_S, self._line))
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


def _within(timeout_s: float, read: Callable[[], T]) -> T:
    """What ``read``, which may block, returns; TimeoutError if it takes longer."""
    found: list[T] = []
    thread = threading.Thread(target=lambda: found.append(read()), daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not found:
        raise TimeoutError(f"the proxy did not answer within {timeout_s:g} s")
    return found[0]


def weather_of(values: dict[str, Any]) -> Weather:
    """A Weather of JSON's values. Raises TypeError or ValueError."""
    outages = tuple((float(a), float(b)) for a, b in values.pop("outages", ()))
    weather = Weather(**values, outages=outages)
    if problem := weather.problem():
        raise ValueError(problem)
    return weather


def obey(relay: Relay, command: str) -> dict[str, Any]:
    """Do what a line says, and what to answer: an object, with ``error`` where it says nothing."""
    word, _, rest = command.strip().partition(" ")
    try:
        if word == "counts":
            return asdict(relay.path.counts)
        if word == "log":
            log = list(relay.path.log)
            relay.path.log.clear()
            return {"log": log}
        if word == "outage":
            relay.outage(float(rest))
        elif word == "weather":
            relay.set_weather(weather_of(asdict(relay.path.weather) | json.loads(rest)))
        elif word in ("cut", "restore"):
            relay.cut(word == "cut")
        elif word == "reset":
            relay.reset()
        else:
            return {
                "error": f"{word!r} is no command: outage, cut, restore, reset, counts, weather"
            }
    except (ValueError, TypeError) as error:
        return {"error": f"{command.strip()!r}: {error}"}
    return {"done": word}


async def serve(
    target: tuple[str, int], listen: tuple[str, int], weather: Weather, lines: asyncio.StreamReader
) -> None:
    """Relay until ``lines`` ends, obeying each."""
    relay = Relay(target, weather)
    port = await relay.listen(*listen)
    print(f"{_READY}{listen[0]}:{port}", flush=True)
    while line := await lines.readline():
        print(json.dumps(obey(relay, line.decode())), flush=True)
    await relay.close()


async def _standard_input() -> asyncio.StreamReader:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


# -- flags -----------------------------------------------------------------------------------


def _joined(address: tuple[str, int]) -> str:
    return f"{address[0]}:{address[1]}"


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no HOST:PORT")
    return host, int(port)


def _outage(text: str) -> tuple[float, float]:
    begin, _, length = text.partition(":")
    return float(begin), float(length)


def _arguments(argv: Sequence[str] | None) -> tuple[argparse.Namespace, Weather]:
    made = argparse.ArgumentParser("python -m bench.netproxy", description=__doc__.split("\n")[0])
    made.add_argument("--to", type=_address, metavar="HOST:PORT", help="the server")
    made.add_argument("--listen", type=_address, metavar="HOST:PORT", default=("127.0.0.1", 0))
    plain = Weather()
    numbers = ("delay_ms", "jitter_ms", "stall_chance", "stall_ms", "kbit_per_s")
    for name in numbers:
        flag = f"--{name.replace('_', '-')}"
        made.add_argument(flag, type=float, default=getattr(plain, name), metavar="N")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--outage", type=_outage, action="append", default=[], metavar="BEGIN:LENGTH")
    made.add_argument("--weather", help=argparse.SUPPRESS)
    made.add_argument("--check", action="store_true", help="measure its own delay, and end")
    args = made.parse_args(argv)
    if not args.check and args.to is None:
        made.error("--to HOST:PORT says where the server is; or --check")
    flags = {name: getattr(args, name) for name in (*numbers, "seed")} | {"outages": args.outage}
    try:
        return args, weather_of(json.loads(args.weather) if args.weather else flags)
    except (ValueError, TypeError) as error:
        made.error(str(error))


def main(argv: Sequence[str] | None = None) -> None:
    """Relay, or check."""
    args, weather = _arguments(argv)
    if args.check:
        rows = check(weather)
        for row in rows:
            print(json.dumps(row))
        sys.exit(0 if all(row["ok"] for row in rows) else 1)

    async def run() -> None:
        await serve(args.to, args.listen, weather, await _standard_input())

    with (
        contextlib.suppress(KeyboardInterrupt),
        asyncio.Runner(loop_factory=loop_factory) as runner,
    ):
        runner.run(run())


if __name__ == "__main__":
    main()
