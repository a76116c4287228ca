"""What each actor of a cluster runs, from one configuration. Pure; knows neither Ray nor sockets.

A replica is a *home*, which has the entry model and the HTTP endpoint, and a *member* for each
further host, which has the models there and an edge port. The home's link agents dial them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from trserve.cluster.actor import FOLDER, HOST, PORT, peer
from trserve.config import LaunchConfig
from trserve.config_hosts import LOCAL
from trserve.config_show import as_file
from trserve.gpus.plan import GPU_DEVICE
from trserve.keys import ADMIN_VARIABLE, API_VARIABLE

SETTINGS: Final = "settings.yaml"
API_KEYS: Final = "api.keys"
ADMIN_KEY: Final = "admin.key"
HOME_KEYS: Final = "home.keys"
MEMBER_KEYS: Final = "member.keys"


@dataclass(frozen=True)
class Part:
    """One actor's server.

    Attributes:
        title: what to call it to a person.
        files: what goes into its private directory, by name.
        environment: may name that directory, as arguments and files may.
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
        config: with the texts of clients' keys, if they have any.
        key: what everybody is to ask of the endpoint in front; None where clients have keys.
        keys: contents of the key files of those that dial and of those that listen; None where
            there is one host only.
    """
    groups = config.hosts.host_groups or (tuple(range(len(config.model.models))),)
    homes = {HOME_KEYS: keys[0]} if keys else {}
    parts = [_part(config, f"replica {replica}", groups, 0, homes)] + [
        _part(config, f"replica {replica}, host {n}", groups, n, {MEMBER_KEYS: keys[1]})
        for n in range(1, len(groups))
        if keys
    ]
    environment, files = _keys_of(config, key)
    return [replace(part, environment=environment, files={**part.files, **files}) for part in parts]


def _keys_of(config: LaunchConfig, key: str | None) -> tuple[dict[str, str], dict[str, str]]:
    """Variables and files by which a server learns its keys; settings files never have any."""
    files = {}
    if config.endpoint.api_key:
        files[API_KEYS] = "\n".join(config.endpoint.api_key)
    if config.endpoint.admin_key:
        files[ADMIN_KEY] = config.endpoint.admin_key
    named = {API_VARIABLE: API_KEYS, ADMIN_VARIABLE: ADMIN_KEY}
    environment = {v: f"@{FOLDER}/{name}" for v, name in named.items() if name in files}
    return environment | ({API_VARIABLE: key} if key else {}), files


def _part(
    config: LaunchConfig,
    title: str,
    groups: Sequence[Sequence[int]],
    host: int,
    keys: Mapping[str, str],
) -> Part:
    own = set(groups[host])
    names = tuple(
        name if index in own else f"{name}@{_elsewhere(groups, host, index)}"
        for index, name in enumerate(config.model.models)
    )
    hosts = replace(
        config.hosts,
        executor=LOCAL,
        replicas=1,
        host_groups=(),
        edge_listen=f"{HOST}:{PORT}" if host else config.hosts.edge_listen,
        edge_keys=f"{FOLDER}/{next(iter(keys))}" if keys else config.hosts.edge_keys,
        edge_sessions=max(config.hosts.edge_sessions, config.engine.max_requests if host else 0),
    )
    endpoint = replace(config.endpoint, host="127.0.0.1" if host else HOST, port=0)
    part = replace(
        config, model=replace(config.model, models=names), hosts=hosts, endpoint=endpoint
    )
    gpus, cpus = _needs(config, own)
    return Part(
        title=title,
        arguments=("launch", "--config", f"{FOLDER}/{SETTINGS}"),
        files={SETTINGS: as_file(part), **keys},
        members=range(1, len(groups)) if host == 0 else (),
        gpus=gpus,
        cpus=cpus,
    )


def _needs(config: LaunchConfig, own: Collection[int]) -> tuple[int, int]:
    """GPUs and CPUs of a host that runs the models ``own``."""
    placement = config.placement
    threads = {index: placement.threads[index] if placement.threads else 1 for index in own}
    sizes = {index: placement.tp[index] if placement.tp else 1 for index in own}
    if placement.device != GPU_DEVICE:
        return 0, sum(threads[index] * sizes[index] for index in own)
    named = {gpu for index in own for gpu in (placement.gpus[index] if placement.gpus else ())}
    # Where none is named models share the first ones, so the widest says how many.
    return len(named) or max(sizes.values()), sum(threads.values())


def _elsewhere(groups: Sequence[Sequence[int]], host: int, index: int) -> str:
    """Where ``host`` finds model ``index`` of another one: members only ever speak to the home."""
    if host:
        return "edge"
    return peer(next(number for number, group in enumerate(groups) if index in group))
