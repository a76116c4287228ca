"""The links between models on GPUs: which is chosen for each pair, and whether GPUs reach others.

The choice is the launch's own. Knows no device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from trserve.config import LaunchConfig
from trserve.doctor.findings import Finding, Level
from trserve.errors import StartupError
from trserve.gpus import proven
from trserve.gpus.links import link_topology, unreached
from trserve.gpus.planning import Planned
from trserve.gpus.programs import DriverError
from trserve.gpus.topology import read_peer_access
from trserve.ipc.device.choice import choose_link

_TOKEN_BYTES: Final = 4
_PLACES: Final = "--gpus"


def check_links(config: LaunchConfig, names: Sequence[str], planned: Planned) -> list[Finding]:
    """One finding for each pair of models, and one where GPUs do not reach each other."""
    return [*_peer_access(planned), *_choices(config, names, planned)]


def _choices(config: LaunchConfig, names: Sequence[str], planned: Planned) -> list[Finding]:
    here = [index for index, group in enumerate(planned.groups) if group]
    rows = [need.most_tokens // config.engine.max_requests for need in planned.needs]
    row_bytes = max(rows) * config.engine.max_requests * _TOKEN_BYTES
    unproven = proven.unproven(proven.LINKS)
    try:
        topology = link_topology([names[i] for i in here], here, planned, row_bytes)
        chosen = choose_link(topology, config.hosts.link)
    except StartupError as error:
        return [Finding.of_error("link", error, "--link")]
    return [Finding("link", Level.OK, reason, unproven=unproven) for reason in chosen.reasons]


def _peer_access(planned: Planned) -> list[Finding]:
    if len({number for group in planned.groups for number in group}) < 2:
        return []
    unproven = proven.unproven(proven.LINKS)
    try:
        missing = unreached(planned, read_peer_access())
    except DriverError as error:
        fix = "tokens and sums go through the host's memory; a newer driver tells more"
        return [Finding("P2P", Level.WARNING, str(error), _PLACES, fix, unproven=unproven)]
    if not missing:
        return [Finding("P2P", Level.OK, "the GPUs in use reach each other", unproven=unproven)]
    shown = "; ".join(f"GPU {a} and {b}: {why}" for (a, b), why in missing.items())
    what = f"{shown}: tokens, and sums of tensor parallel models, go through the host's memory"
    fix = "choose GPUs that reach each other (nvidia-smi topo -p2p r), or accept it"
    return [Finding("P2P", Level.WARNING, what, _PLACES, fix, unproven=unproven)]
