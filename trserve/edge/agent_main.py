"""The process of a link agent: stands in this host's slab for a model at another host.

Puts the parts together; each of them knows less than this file. Imports no torch.
"""

from __future__ import annotations

import hashlib
import logging
import os
import select
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

import msgspec

from trserve.edge.agent import Agent
from trserve.edge.agent_table import AgentTable
from trserve.edge.cloud import Cloud
from trserve.edge.curve import read_client_keys
from trserve.edge.greeting import Hello, describe
from trserve.edge.link_counts import LinkCounts
from trserve.edge.nccl_opening import open_nccl
from trserve.edge.reachability import Reachability
from trserve.edge.tcp_cloud import TcpCloud
from trserve.edge.wire import Limits
from trserve.errors import StartupError
from trserve.ipc.child import ChildArguments, begin_child, parse_child_arguments, say_hello
from trserve.ipc.child_run import run_child
from trserve.ipc.control import ControlClient, worker_identity
from trserve.ipc.doorbell import ring
from trserve.ipc.links import ShmMedium, open_outbox, receivers
from trserve.ipc.slab import Slab
from trserve.ipc.tally import TallyWriter
from trserve.places import OPENAI
from trserve.plan import ServerPlan
from trserve.restarts import FAIL
from trserve.router_lib.parameters import ServerParameter, TextParameter
from trserve.router_lib.registry import describe as describe_router
from trserve.waiting import wait_readable

log = logging.getLogger(__name__)
START_S: Final = 8.0
BRIEFLY_S: Final = 2.0
"""How long the start waits for the far side, where requests can do without it."""

LOADING_S: Final = 600.0
_LOOK_S: Final = 0.05
_COUNTS: Final = {
    "handoffs": "link_handoffs",
    "handoff_bytes": "link_handoff_bytes",
    "contacts": "link_contacts",
    "contact_bytes": "link_contact_bytes",
    "answers": "link_answers",
    "answer_bytes": "link_answer_bytes",
    "round_trip_us": "link_round_trip_us",
    "nccl_handoffs": "link_nccl_handoffs",
    "nccl_answers": "link_nccl_answers",
}
"""Words of the agent by what its link counts."""


class AgentLoop:
    """Runs a link agent until it is told to stop or the launcher is gone."""

    def __init__(
        self, arguments: ChildArguments, plan: ServerPlan, control: ControlClient, cloud: Cloud
    ) -> None:
        index = arguments.index
        slab = Slab(arguments.slab_fd, plan.layout)
        remote = [i for i, model in enumerate(plan.models) if model.remote]
        outbox = open_outbox(slab, arguments.bells, index)
        self._index = index
        self._bells = arguments.bells
        self._words = slab.workers[index]
        self._control = control
        self._cloud = cloud
        self._launcher_fd = arguments.launcher_fd
        self._table = AgentTable(
            slab, outbox, index, remote, plan.tokenizer_size, TallyWriter(slab, index)
        )
        reach = Reachability(self._words, plan.on_peer_loss, plan.link_heartbeat_s, self._ring_all)
        self._agent = Agent(
            slab,
            self._table,
            cloud,
            reach,
            receivers(ShmMedium(slab), plan.layout, index),
            policy=plan.on_peer_loss,
            locals_=[i for i, model in enumerate(plan.models) if not model.remote],
            timeout_s=plan.remote_timeout_s,
            name=f"{plan.models[index].name} at {plan.models[index].remote}",
            publish=outbox.flush,
            remote=remote,
        )
        self._poller = select.epoll()
        # As a worker's: the bell is never read, and a poll says once that it rang.
        self._poller.register(arguments.bells[index], select.EPOLLIN | select.EPOLLET)
        for fd in (cloud.fd, control.fd, arguments.launcher_fd):
            self._poller.register(fd, select.EPOLLIN)

    def run(self) -> None:
        """Serve until stopped."""
        try:
            self._agent.begin()
            while self._turn(self._poller.poll(self._agent.due_s(time.monotonic()))):
                pass
        finally:
            if isinstance(self._cloud, TcpCloud):  # a call by HTTP may take long to end
                self._cloud.close()

    def _turn(self, events: Sequence[tuple[int, int]]) -> bool:
        """One iteration; False once the loop is to end."""
        if self._launcher_fd in {fd for fd, _ in events}:
            log.error("the launcher ended; so does this link agent")
            return False
        if not self._heed():
            return False
        self._agent.turn(time.monotonic())
        self._note()
        return True

    def _heed(self) -> bool:
        """Take in what the launcher says; False once the agent is to end."""
        while messages := self._control.receive_all():
            for message in messages:
                kind = message["type"]
                if kind == "stop":
                    return False
                if kind == "router_config":
                    self._cloud.configure(numbers(message["values"]))
                elif kind in _ANSWERS:  # it has no cache, and nothing to take in
                    answer = {"type": _ANSWERS[kind], "number": message["number"]}
                    self._control.send({**answer, "model": self._index})
        return True

    def _ring_all(self) -> None:
        for bell in self._bells:
            ring(bell)

    def _note(self) -> None:
        words, held = self._words, len(self._table.held)
        words.set("heartbeat", time.monotonic_ns())
        words.set("running", held)
        words.set("in_step", held)
        counts = getattr(self._cloud, "counts", LinkCounts())
        found = asdict(counts)
        for name, word in _COUNTS.items():
            words.set(word, found[name])
        words.set("steps", counts.answers)
        words.set("link_dropped", self._table.dropped + counts.bad_frames)


_ANSWERS: Final = {"flush_cache": "cache_flushed", "confirm": "confirmed"}


def numbers(values: Mapping[str, object]) -> dict[str, float]:
    """Those of a router's values that a request may have of its own."""
    return {name: float(v) for name, v in values.items() if isinstance(v, int | float)}


def instance_of(arguments: ChildArguments) -> bytes:
    """Tells this server from every other, and stays when its agent is started again."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    stat = Path(f"/proc/{arguments.parent}/stat").read_bytes().rpartition(b")")[2].split()
    slab = os.fstat(arguments.slab_fd)
    parts = (boot, b"%d" % arguments.parent, stat[19], b"%d %d" % (slab.st_dev, slab.st_ino))
    return hashlib.sha256(b"\0".join((*parts, os.uname().nodename.encode()))).digest()[:16]


def create_cloud(arguments: ChildArguments, plan: ServerPlan) -> Cloud:
    """The far side of model ``arguments.index``. ConfigError where the keys are wrong."""
    model = plan.models[arguments.index]
    values = numbers(plan.router_config)
    if model.remote.startswith(OPENAI):
        from trserve.edge.openai_cloud import OpenAiCloud
        from trserve.edge.openai_setup import check_router, read_key

        check_router(plan.router)
        url = model.remote.removeprefix(OPENAI)
        key = read_key(plan.edge_keys) if plan.edge_keys else ""
        return OpenAiCloud(
            url,
            index=arguments.index,
            model=model.name,
            values=values,
            key=key,
            vocabulary=plan.tokenizer_size,
        )
    hello = Hello(
        side=describe(plan, plan.link_heartbeat_s),
        instance=instance_of(arguments),
        model=arguments.index,
        max_model_len=model.max_model_len,
    )
    limits = Limits(plan.row_tokens, plan.tokenizer_size, len(plan.models))
    keys = read_client_keys(plan.edge_keys)
    if (side := open_nccl(plan)) is None:
        return TcpCloud(model.remote, keys, hello, limits, values)
    from trserve.edge.nccl_cloud import NcclCloud

    return NcclCloud(model.remote, keys, hello, limits, side, values)


def reach_first(cloud: Cloud, policy: str) -> None:
    """Reach it for the first time, or give up. StartupError where the server must not start then.

    A refusal is one: trying again does not change it.
    """
    now = time.monotonic()
    cloud.start(now)
    deadline, said = now + (START_S if policy == FAIL else BRIEFLY_S), False
    while not cloud.connected and now < deadline and not cloud.refused:
        wait_readable(cloud.fd, min(_LOOK_S, cloud.due_s(now)))
        now = time.monotonic()
        cloud.poll(now)
        if getattr(cloud, "greeted", False) and policy == FAIL and not said:
            log.info("%s", cloud.reason)
            deadline, said = now + LOADING_S, True
    if cloud.refused or (policy == FAIL and not cloud.connected):
        raise StartupError(cloud.reason)


def router_parameters(plan: ServerPlan) -> list[dict[str, object]]:
    """What requests may say to the router, where the entry model is not here to know it."""
    entry = describe_router(plan.router)
    return [
        msgspec.to_builtins(parameter) | {"value": plan.router_config.get(parameter.name)}
        for parameter in (entry.parameters if entry is not None else ())
        if not isinstance(parameter, TextParameter | ServerParameter)
    ]


def _prepare(arguments: ChildArguments, control: ControlClient) -> AgentLoop:
    plan = msgspec.convert(say_hello(control), ServerPlan)
    cloud = create_cloud(arguments, plan)
    reach_first(cloud, plan.on_peer_loss)
    loop = AgentLoop(arguments, plan, control, cloud)
    control.send({"type": "ready", "router_parameters": router_parameters(plan)})
    return loop


def main() -> int:
    """Reach the other host, serve, leave; returns the exit code."""
    arguments = parse_child_arguments()
    begin_child(arguments, name=f"link-{arguments.index}")
    control = ControlClient(arguments.control, worker_identity(arguments.index))
    return run_child(control, "this link agent", lambda: _prepare(arguments, control).run)


if __name__ == "__main__":
    sys.exit(main())
