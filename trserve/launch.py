"""``trserve launch``: from a configuration to a server that has ended.

Knows what has to be there before the supervisor starts; nothing of what it supervises.
"""

from __future__ import annotations

import os

from trserve.banner import show_note
from trserve.config import LaunchConfig
from trserve.config_hosts import RAY
from trserve.endpoint_plan import cautions
from trserve.front import HttpFront, listen
from trserve.ipc.instance import sweep_dead_instances
from trserve.ipc.process import become_subreaper
from trserve.launcher import Launcher
from trserve.plan import make_plan
from trserve.process_environment import process_environment
from trserve.service_manager import ServiceManager


def launch(config: LaunchConfig) -> int:
    """Run a server until it ends; returns the exit code. Raises StartupError before it starts."""
    if config.hosts.executor == RAY:
        from trserve.cluster.ray_launch import launch_on_ray

        return launch_on_ray(config)
    plan = make_plan(config)
    os.environ.update(process_environment(config))
    for caution in cautions(config.endpoint, plan.endpoint):
        show_note(caution)
    listener = listen(config.endpoint.host, config.endpoint.port)
    try:
        sweep_dead_instances()
        become_subreaper()
        front = HttpFront(listener, ServiceManager.of(os.environ))
        with Launcher(plan, front, config.faults.drain_timeout) as launcher:
            return launcher.run()
    finally:
        listener.close()
