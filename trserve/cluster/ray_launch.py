"""``trserve launch --executor ray``: groups of workers on a Ray cluster behind one endpoint.

Ray places each actor, and starts it again elsewhere when its host is lost; this process asks them
where they are and sends them the requests. Knows Ray's calls; nothing of what a request means.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from trserve.banner import show_note
from trserve.cluster.actor import GroupActor
from trserve.cluster.parts import Part, parts_of
from trserve.config import LaunchConfig
from trserve.endpoint_plan import EndpointPlan, cautions, plan_endpoint
from trserve.errors import EXIT_UNAVAILABLE, EXIT_WORKER_LOST, ModelUnavailableError
from trserve.front import listen
from trserve.keys import (
    ADMIN_VARIABLE,
    API_VARIABLE,
    check_lines,
    read_admin_key,
    read_api_keys,
)

if TYPE_CHECKING:
    from trserve.cluster.front_server import FrontServer

ASK_EVERY_S: Final = 1.0
ASK_TIMEOUT_S: Final = 5.0
PLACE_TIMEOUT_S: Final = 120.0
_NAMESPACE: Final = "trserve"
_TELL_EVERY_S: Final = 10.0


def launch_on_ray(config: LaunchConfig) -> int:
    """Run until it ends; returns the exit code. StartupError before anything is started."""
    ray = import_ray()
    config, endpoint = _with_keys(config)
    key = None if endpoint.api_keys else secrets.token_urlsafe(32)
    listener = listen(config.endpoint.host, config.endpoint.port)
    try:
        _join(ray, config.hosts.ray_address)
        try:
            return _run(ray, config, listener, key, endpoint)
        finally:
            ray.shutdown()
    finally:
        listener.close()


def _with_keys(config: LaunchConfig) -> tuple[LaunchConfig, EndpointPlan]:
    """``config`` with the texts of its keys, which the replicas need; and what is kept of them."""
    given = config.endpoint
    keys = read_api_keys(given.api_key)
    check_lines(keys, "--api-key" if given.api_key else API_VARIABLE)
    admin = read_admin_key(given.admin_key, keys) or ""
    check_lines([admin], "--admin-key" if given.admin_key else ADMIN_VARIABLE)
    known = replace(given, api_key=tuple(keys), admin_key=admin)
    endpoint = plan_endpoint(known)
    for caution in cautions(given, endpoint):
        show_note(caution)
    return replace(config, endpoint=known), endpoint


def import_ray() -> Any:
    """The library. ModelUnavailableError where it is not installed."""
    try:
        import aiohttp  # noqa: F401  (the front's, of the same extra)
        import ray
    except ImportError as error:
        raise ModelUnavailableError(
            f"--executor ray: {error.name} is not installed\n"
            "install trserve[cluster] on every host, or leave the flag out"
        ) from None
    return ray


def _join(ray: Any, address: str) -> None:
    try:
        ray.init(address=address, namespace=_NAMESPACE, logging_level="warning", log_to_driver=True)
    except (ConnectionError, ValueError, RuntimeError) as error:
        what = " ".join(str(error).split())[:200]
        raise ModelUnavailableError(
            f"--ray-address {address}: no Ray cluster answers ({what})"
            "\nstart one (`ray start --head`, and `ray start --address` on the other hosts)"
        ) from None


def _run(
    ray: Any,
    config: LaunchConfig,
    listener: socket.socket,
    key: str | None,
    endpoint: EndpointPlan,
) -> int:
    import uvloop

    keys = _link_keys() if len(config.hosts.host_groups) > 1 else None
    replicas = [parts_of(config, n, key, keys) for n in range(config.hosts.replicas)]
    group = _place(ray, [part for parts in replicas for part in parts])
    try:
        bundles = iter(range(sum(map(len, replicas))))
        actors = [
            Replica([_start(ray, part, group, next(bundles)) for part in parts], parts)
            for parts in replicas
        ]

        async def serve() -> int:
            from trserve.cluster.front_server import FrontServer

            front = FrontServer(listener, len(actors), key, endpoint)
            cluster = Cluster(ray, actors, front, listener)
            front.app.describe = lambda: {"parts": [each.describe() for each in actors]}
            try:
                return await front.serve(cluster.supervise, config.faults.drain_timeout)
            finally:
                await cluster.stop(config.faults.drain_timeout)

        return uvloop.run(serve())
    finally:
        ray.util.remove_placement_group(group)


def _link_keys() -> tuple[str, str]:
    """Contents of fresh key files: of those that dial, and of those that listen."""
    from trserve.edge.keys_command import make_files

    with tempfile.TemporaryDirectory() as folder:
        listens, dials = Path(folder, "listens"), Path(folder, "dials")
        make_files(listens, dials, "home")
        return dials.read_text(), listens.read_text()


def _place(ray: Any, parts: Sequence[Part]) -> Any:
    """A bundle of resources for each part, on hosts of their own as far as there are any."""
    bundles = [{"CPU": part.cpus} | ({"GPU": part.gpus} if part.gpus else {}) for part in parts]
    group = ray.util.placement_group(bundles, strategy="SPREAD")
    if not group.wait(PLACE_TIMEOUT_S):
        ray.util.remove_placement_group(group)
        raise ModelUnavailableError(
            f"--executor ray: the cluster has no room for {bundles} within {PLACE_TIMEOUT_S:g} s, "
            f"only {ray.available_resources()}\nadd hosts, or lower --replicas or --threads"
        )
    return group


def _start(ray: Any, part: Part, group: Any, bundle: int) -> Any:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
    options = {"num_cpus": part.cpus, "num_gpus": part.gpus, "max_restarts": -1}
    made = ray.remote(GroupActor).options(**options, scheduling_strategy=where)
    return made.remote(part.arguments, part.environment, part.files, part.members)


class Replica:
    """The actors of one replica, the home first, and what they last said."""

    def __init__(self, actors: Sequence[Any], parts: Sequence[Part]) -> None:
        self.actors = actors
        self.parts = parts
        self.said: list[dict[str, Any]] = [{} for _ in actors]

    @property
    def url(self) -> str:
        """Where its home serves; empty while it does not."""
        return str(self.said[0].get("url", ""))

    @property
    def detail(self) -> str:
        """What each part does."""
        pairs = zip(self.parts, self.said, strict=True)
        return "; ".join(f"{part.title}: {said.get('detail', 'starting')}" for part, said in pairs)

    def describe(self) -> list[dict[str, Any]]:
        """Where each part is and how."""
        kept = ("address", "node", "detail")
        pairs = zip(self.parts, self.said, strict=True)
        return [{"title": part.title} | {k: said.get(k, "") for k in kept} for part, said in pairs]

    @property
    def failure(self) -> tuple[int, str] | None:
        """The exit code and message of a part that will never serve."""
        for part, said in zip(self.parts, self.said, strict=True):
            if said.get("exit_code") is not None:
                return int(said["exit_code"]), f"{part.title}: {said['detail']}"
        return None


def _lost(error: Exception) -> dict[str, Any]:
    """What is said for an actor that cannot say it. Ray gives up one that could not be made."""
    if getattr(error, "actor_init_failed", False):
        last = next((line for line in reversed(str(error).splitlines()) if line.strip()), "")
        why = f"its host cannot make it: {last.strip()}; is the same trserve installed there?"
        return {"url": "", "detail": why, "exit_code": EXIT_UNAVAILABLE}
    what = type(error).__name__
    return {"url": "", "detail": f"its host or process is lost ({what}); Ray restarts it"}


class Cluster:
    """Asks the actors how they are, and tells the front and a person."""

    def __init__(
        self, ray: Any, replicas: Sequence[Replica], front: FrontServer, listener: socket.socket
    ) -> None:
        self._ray = ray
        self._replicas = replicas
        self._front = front
        self._listener = listener
        self._is_ready = False
        self._told = ""
        self._tell_at = 0.0

    async def supervise(self) -> int:
        """Ask until something is wrong for good; returns the exit code."""
        while True:
            await asyncio.gather(*(self._ask(n) for n in range(len(self._replicas))))
            if (code := self._failed()) is not None:
                return code
            self._tell()
            await asyncio.sleep(ASK_EVERY_S)

    def _failed(self) -> int | None:
        """The exit code if a replica cannot serve at the start, or none can any more."""
        failures = [each.failure for each in self._replicas if each.failure is not None]
        if not failures or (self._is_ready and len(failures) < len(self._replicas)):
            return None
        code, cause = failures[0]
        show_note(cause)
        return EXIT_WORKER_LOST if self._is_ready else code

    async def _ask(self, index: int) -> None:
        replica = self._replicas[index]
        for number, actor in enumerate(replica.actors):
            try:
                said = await self._call(actor.status.remote())
            except TimeoutError:  # perhaps only busy: whether it serves the front finds out
                late = f"its host does not answer within {ASK_TIMEOUT_S:g} s"
                said = {**replica.said[number], "detail": late}
            except self._ray.exceptions.RayError as error:
                said = _lost(error)
            replica.said[number] = said
        await self._connect(replica)
        self._front.groups.move(index, replica.url, replica.detail)

    async def _connect(self, replica: Replica) -> None:
        """Tell the home where its members are, once they serve: it asks them before it plans."""
        for number in replica.parts[0].members:
            said = replica.said[number]
            if said.get("url"):
                try:
                    await self._call(
                        replica.actors[0].connect.remote(number, said["address"], said["port"])
                    )
                except (self._ray.exceptions.RayError, TimeoutError):
                    return  # the home itself is away: it is told once it is back

    async def _call(self, reference: Any) -> Any:
        return await asyncio.wait_for(asyncio.wrap_future(reference.future()), ASK_TIMEOUT_S)

    def _tell(self) -> None:
        """The ready line once all groups serve; before, and afterwards, what changes."""
        groups = self._front.groups.all
        if not self._is_ready and all(group.ready for group in groups):
            self._is_ready = True
            host, port = self._listener.getsockname()[:2]
            line = str(self._replicas[0].said[0]["ready_line"])
            _, _, rest = line.partition(" models=")
            print(f"trserve ready http://{host}:{port} models={rest}", flush=True)
        detail = "; ".join(f"group {g.index}: {'ready' if g.ready else g.detail}" for g in groups)
        if detail != self._told and time.monotonic() >= self._tell_at:
            self._told, self._tell_at = detail, time.monotonic() + _TELL_EVERY_S
            show_note(detail)

    async def stop(self, drain_s: float) -> None:
        """End every group; what Ray does not answer is left to it, as the placement is removed."""
        asked = [actor.stop.remote(drain_s) for each in self._replicas for actor in each.actors]
        waits = [asyncio.wrap_future(reference.future()) for reference in asked]
        if waits:
            await asyncio.wait(waits, timeout=drain_s + 2 * ASK_TIMEOUT_S)
        for each in self._replicas:
            for actor in each.actors:
                self._ray.kill(actor)
