"""The settings of links and other hosts: how the models of a server reach each other.

Knows what a setting may be; nothing of sockets, devices or plans.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from trserve.config_option import option
from trserve.errors import ConfigError
from trserve.places import check_address

LINKS: Final = ("auto", "shm", "host_mapped", "cuda_ipc", "nccl", "tcp")
EXECUTORS: Final = ("local", "ray")


@dataclass(frozen=True)
class HostsConfig:
    """How models reach each other, on one host and on several."""

    link: str = option(
        LINKS[0],
        "What carries tokens between models: auto takes the fastest that this machine has "
        "(`trserve doctor` shows it); tcp is for models at other hosts (NAME@HOST:PORT).",
        choices=LINKS,
    )
    executor: str = option(
        EXECUTORS[0],
        "Who places, watches and restarts the processes: this command, or a Ray cluster "
        "(needs trserve[cluster]).",
        choices=EXECUTORS,
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


def check_hosts(config: HostsConfig) -> None:
    """Raise ConfigError naming the flag that is wrong."""
    if config.edge_listen:
        check_address("--edge-listen", config.edge_listen)
    if config.edge_sessions < 1:
        raise ConfigError(f"--edge-sessions {config.edge_sessions}: must be 1 or more")
    if not 0 <= config.remote_timeout_s < math.inf:
        raise ConfigError(f"--remote-timeout-s {config.remote_timeout_s:g}: must be 0 or more")
