"""The golden comparison across two network namespaces: ``python -m tests.edge.network.across``.

Runs as root of a user and a network namespace of its own (``unshare --user --map-root-user
--net``). It makes a second one, joins both by a pair of virtual Ethernet devices, starts the far
server there and the home server here. The proxy, which is here too, dials over that pair: the two
servers have no other way to each other.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.edge.network.equality import Loop, cases_of, check_waited, check_went_on
from tests.edge.network.joined import BRIEF, ISSUE, far_side, listen
from tests.golden.random_pair import build_random_pair

HERE, THERE = "10.77.0.1", "10.77.0.2"
MADE_S = 10.0


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


def namespace_of(pid: int | str) -> str:
    return os.readlink(f"/proc/{pid}/ns/net")


@contextmanager
def second_namespace() -> Iterator[tuple[str, ...]]:
    """The words that start a command there; both ends of the pair are up."""
    holder = subprocess.Popen(["unshare", "--net", "sleep", "3600"])
    try:
        deadline = time.monotonic() + MADE_S
        while namespace_of(holder.pid) == namespace_of("self"):
            assert time.monotonic() < deadline, "no second namespace"
            time.sleep(0.01)
        inside = ("nsenter", "--net", "--target", str(holder.pid))
        run("ip", "link", "set", "lo", "up")
        run(*inside, "ip", "link", "set", "lo", "up")
        pair = ("type", "veth", "peer", "name", "far", "netns", str(holder.pid))
        run("ip", "link", "add", "home", *pair)
        run("ip", "address", "add", f"{HERE}/30", "dev", "home")
        run("ip", "link", "set", "home", "up")
        run(*inside, "ip", "address", "add", f"{THERE}/30", "dev", "far")
        run(*inside, "ip", "link", "set", "far", "up")
        yield inside
    finally:
        holder.kill()
        holder.wait()


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--brief", action="store_true", help="the times of the usual tests")
    way = BRIEF if made.parse_args().brief else ISSUE
    with tempfile.TemporaryDirectory() as folder, second_namespace() as inside:
        loop = Loop(build_random_pair(Path(folder), seed=5))
        cases = cases_of(loop, "entropy", way, visits=(1, 3))
        shared = ("--router", "entropy")
        deadline = ("--remote-timeout-s", str(way.timeout_s))
        kinds = (("wait", (), check_waited), ("degrade", deadline, check_went_on))
        with far_side(loop.pair, way.weather, shared, host=THERE, prefix=inside) as far:
            for number, (kind, more, check) in enumerate(kinds):
                with far.home(number, "--on-peer-loss", kind, *more) as home:
                    bodies = [case.body(home.models) for case in cases]
                    heard = listen(home, bodies, way, far.proxy)
                print(f"{kind}: {check(loop, cases, heard)}")
                assert any(any(each.alone) for each in heard) is (kind == "degrade")


if __name__ == "__main__":
    main()
