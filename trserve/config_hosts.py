"""The settings of links and other hosts: how the models of a server reach each other.

Knows what a setting may be; nothing of sockets, devices or plans.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from trserve.config_option import option
from trserve.config_values import parse_groups
from trserve.errors import ConfigError
from trserve.places import check_address

LINKS: Final = ("auto", "shm", "host_mapped", "cuda_ipc", "nccl", "tcp")
LOCAL: Final = "local"
RAY: Final = "ray"
EXECUTORS: Final = (LOCAL, RAY)


@dataclass(frozen=True)
class HostsConfig:
    """How models reach each other, on one host and on several."""

    link: str = option(
        LINKS[0],
        "What carries tokens between models: auto takes the fastest that this machine has "
        "(`trserve doctor` shows it). Models at other hosts (NAME@HOST:PORT) have tcp; with nccl, "
        "given on both sides, token ids go between the hosts by NCCL, not encrypted.",
        choices=LINKS,
    )
    executor: str = option(
        EXECUTORS[0],
        "Who places, watches and restarts the processes: this command, or a Ray cluster "
        "(needs trserve[cluster]).",
        choices=EXECUTORS,
    )
    ray_address: str = option(
        "auto",
        "The Ray cluster for --executor ray: auto is the one that this host is part of, else "
        "HOST:PORT.",
    )
    replicas: int = option(
        1,
        "With --executor ray, how often the whole group of models is there; one endpoint sends "
        "each request to the replica that knows most of its prompt.",
        also=("--data-parallel-size", "--dp-size", "-dp"),
    )
    host_groups: tuple[tuple[int, ...], ...] = option(
        (),
        "With --executor ray, which models share a host, by number: 0/1 puts the second on a host "
        "of its own.  [default: all on one host]",
        parse=parse_groups,
        metavar="0/1",
    )
    edge_listen: str = option(
        "",
        "Where models of other hosts may dial in, to hand their hard tokens to the ones here.  "
        "[default: nowhere]",
        metavar="HOST:PORT",
    )
    edge_keys: str = option(
        "",
        "File of keys for links between hosts, as `trserve keys` makes it.",
        metavar="FILE",
    )
    edge_sessions: int = option(
        64, "Requests of other hosts that are held here at once; the one least recently used goes."
    )
    remote_timeout_s: float = option(
        0.0,
        "Longest visit of a request to a model at another host; then --on-peer-loss says what "
        "becomes of it.  [default: no limit while the link is up]",
    )
    link_heartbeat_s: float = option(
        1.0,
        "Longest silence on a link between hosts, in seconds; after three of them it counts as "
        "broken.",
    )


def check_hosts(config: HostsConfig, models: int) -> None:
    """Raise ConfigError naming the flag that is wrong for so many ``models``."""
    _check_cluster(config, models)
    if config.edge_listen:
        check_address("--edge-listen", config.edge_listen)
    if config.edge_sessions < 1:
        raise ConfigError(f"--edge-sessions {config.edge_sessions}: must be 1 or more")
    if not 0 <= config.remote_timeout_s < math.inf:
        raise ConfigError(f"--remote-timeout-s {config.remote_timeout_s:g}: must be 0 or more")
    if not 0.05 <= config.link_heartbeat_s <= 60.0:
        raise ConfigError(f"--link-heartbeat-s {config.link_heartbeat_s:g}: must be 0.05 to 60")


def _check_cluster(config: HostsConfig, models: int) -> None:
    if config.replicas < 1:
        raise ConfigError(f"--replicas {config.replicas}: must be 1 or more")
    if config.executor == LOCAL:
        for flag, given in (
            ("--replicas", config.replicas > 1),
            ("--host-groups", config.host_groups),
        ):
            if given:
                raise ConfigError(f"{flag}: is for --executor ray")
    groups = config.host_groups
    if config.edge_listen and (groups or config.replicas > 1):
        raise ConfigError(
            f"--edge-listen {config.edge_listen}: whoever dials in wants one server; leave out "
            "--replicas and --host-groups"
        )
    if groups and sorted(sum(groups, ())) != list(range(models)):
        raise ConfigError(f"--host-groups: must name each of the {models} models once, from 0 on")
    if groups and 0 not in groups[0]:
        raise ConfigError("--host-groups: model 0, the entry, must be in the first group")
