"""What each actor of a cluster runs, from one configuration. Pure; knows neither Ray nor sockets.

A replica is a *home*, which has the entry model and the HTTP endpoint, and a *member* for each
further host, which has the models there and an edge port. The home's link agents dial them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from trserve.cluster.actor import FOLDER, HOST, PORT, peer
from trserve.config import LaunchConfig
from trserve.config_hosts import LOCAL, HostsConfig
from trserve.config_show import as_file
from trserve.keys import API_VARIABLE

SETTINGS: Final = "settings.yaml"
HOME_KEYS: Final = "home.keys"
MEMBER_KEYS: Final = "member.keys"


@dataclass(frozen=True)
class Part:
    """One actor's server.

    Attributes:
        title: what to call it to a person.
        files: what goes into its private directory, by name.
        members: which of the replica's members it dials, by number.
        gpus, cpus: what it needs of its host.
    """

    title: str
    arguments: Sequence[str]
    files: Mapping[str, str]
    environment: Mapping[str, str] = field(default_factory=dict)
    members: Sequence[int] = ()
    gpus: int = 0
    cpus: int = 1


def parts_of(
    config: LaunchConfig, replica: int, key: str | None, keys: tuple[str, str] | None
) -> list[Part]:
    """The home of a replica, then its members.

    Args:
        key: what the home is to ask of the endpoint in front; None where clients have keys.
        keys: contents of the key files of those that dial and of those that listen; None where
            there is one host only.
    """
    groups = config.hosts.host_groups or (tuple(range(len(config.model.models))),)
    environment = {API_VARIABLE: key} if key else {}
    homes = {HOME_KEYS: keys[0]} if keys else {}
    home = _part(config, f"replica {replica}", groups, 0, environment, homes)
    members = [
        _part(config, f"replica {replica}, host {n}", groups, n, {}, {MEMBER_KEYS: keys[1]})
        for n in range(1, len(groups))
        if keys
    ]
    return [home, *members]


def _part(
    config: LaunchConfig,
    title: str,
    groups: Sequence[Sequence[int]],
    host: int,
    environment: Mapping[str, str],
    keys: Mapping[str, str],
) -> Part:
    own = set(groups[host])
    names = tuple(
        name if index in own else f"{name}@{_elsewhere(groups, host, index)}"
        for index, name in enumerate(config.model.models)
    )
    hosts = HostsConfig(
        link=config.hosts.link,
        executor=LOCAL,
        edge_listen=f"{HOST}:{PORT}" if host else config.hosts.edge_listen,
        edge_keys=f"{FOLDER}/{next(iter(keys))}" if keys else config.hosts.edge_keys,
        edge_sessions=max(config.hosts.edge_sessions, config.engine.max_requests if host else 0),
        remote_timeout_s=config.hosts.remote_timeout_s,
    )
    endpoint = replace(config.endpoint, host="127.0.0.1" if host else HOST, port=0)
    part = replace(
        config, model=replace(config.model, models=names), hosts=hosts, endpoint=endpoint
    )
    placement = config.placement
    used = [placement.gpus[index] for index in own] if placement.gpus else []
    gpus = len({gpu for group in used for gpu in group}) if placement.device == "cuda" else 0
    threads = [placement.threads[index] for index in own] if placement.threads else [1] * len(own)
    return Part(
        title=title,
        arguments=("launch", "--config", f"{FOLDER}/{SETTINGS}"),
        files={SETTINGS: as_file(part), **keys},
        environment=environment,
        members=range(1, len(groups)) if host == 0 else (),
        gpus=gpus or int(placement.device == "cuda"),
        cpus=sum(threads),
    )


def _elsewhere(groups: Sequence[Sequence[int]], host: int, index: int) -> str:
    """Where ``host`` finds model ``index`` of another one: members only ever speak to the home."""
    if host:
        return "edge"
    return peer(next(number for number, group in enumerate(groups) if index in group))
