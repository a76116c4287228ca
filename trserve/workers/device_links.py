"""A worker's links through its device: which, their opening, their offers and their end.

Where there are none, and so on every server without GPUs, nothing is imported for them. Knows plans
and media; nothing of requests but who finds their ids.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

from trserve.errors import ConfigError, TrserveError
from trserve.gpus.plan import GPU_DEVICE
from trserve.ipc.control import ControlClient, Message
from trserve.ipc.device.choice import CUDA_IPC, HOST_MAPPED, SHM
from trserve.ipc.slab import Slab
from trserve.plan import ServerPlan

if TYPE_CHECKING:
    from trserve.ipc.device.medium import SuffixMedium
    from trserve.workers.runner import Runner
    from trserve.workers.suffix_views import ViewedRows
    from trserve.workers.table import RequestTable

log = logging.getLogger(__name__)

VARIABLE: Final = "TRSERVE_EMULATED_LINK"
"""Names the link that is to go over an emulated device, beside the runner that emulates a GPU's."""

EMULATIONS: Final = (CUDA_IPC, HOST_MAPPED)


@runtime_checkable
class SourceReader(Protocol):
    """A runner whose device can read ids where a link has put them."""

    def read_sources(self) -> None:
        """Be ready for steps with sources; before it is made ready for steps at all."""


def links_of(plan: ServerPlan, index: int, runner: Runner) -> Sequence[str]:
    """The link of worker ``index`` to each, by name; none where none goes through its device.

    Raises:
        ConfigError: links are to be emulated where they cannot be.
    """
    emulated = os.environ.get(VARIABLE, "")
    if emulated:
        names = _emulated(emulated, plan, index, runner)
    else:
        names = plan.links[index] if plan.device == GPU_DEVICE and plan.links else []
    return names if any(name not in ("", SHM) for name in names) else ()


def _emulated(wanted: str, plan: ServerPlan, index: int, runner: Runner) -> list[str]:
    if wanted not in EMULATIONS:
        raise ConfigError(f"{VARIABLE}={wanted}: is one of {', '.join(EMULATIONS)}, for tests")
    if plan.device == GPU_DEVICE or not isinstance(runner, SourceReader):
        raise ConfigError(
            f"{VARIABLE}={wanted}: emulates a GPU's links and needs its runner emulated too: "
            "--device cpu with TRSERVE_RUNNER=graphs-on-cpu, and no --tp"
        )
    away = {i for i, model in enumerate(plan.models) if model.remote}
    return [SHM if i == index or i in away else wanted for i in range(len(plan.models))]


class DeviceLinks:
    """The open links of worker ``index`` under ``names``.

    To be made after the runner's graphs were captured: their calls would break a capture.

    Attributes:
        medium: what the links' ends come from.
    """

    def __init__(self, plan: ServerPlan, slab: Slab, index: int, names: Sequence[str]) -> None:
        from trserve.ipc.device.opening import open_links

        self._rows: ViewedRows | None = None
        if plan.device == GPU_DEVICE:
            self.medium: SuffixMedium = open_links(slab, index, names, wanted=plan.link)
        else:
            from trserve.ipc.device.cpu_device import CpuDevice

            kind = next(name for name in names if name != SHM)
            self.medium = open_links(slab, index, names, wanted=kind, device=CpuDevice)

    def find_suffixes(
        self, slab: Slab, index: int, table: RequestTable, runner: Runner, max_tokens: int
    ) -> None:
        """Have suffixes found on the device, if ``runner`` can read them there.

        Without, as where several ranks compute a model, this worker only sends through its links.
        """
        from trserve.workers.suffix_views import ViewedRows

        if isinstance(runner, SourceReader):
            self._rows = ViewedRows(slab, index, table, self.medium, max_tokens)

    def offer(self, control: ControlClient) -> None:
        """Tell the other workers how to reach this one."""
        for offer in self.medium.offers():
            control.send(offer)

    def accept(self, control: ControlClient, offer: Message) -> None:
        """Take in what another worker tells, and answer."""
        for answer in self.medium.accept(offer):
            control.send(answer)

    def close(self) -> None:
        """Close what belongs to others, and say what the links were good for.

        Own memory goes with the process: others may still have it open.
        """
        if self._rows is not None:
            log.info(
                "link %s: %d of %d suffixes that came were read on the device",
                self.medium.name,
                self._rows.viewed,
                self._rows.came,
            )
        try:
            self.medium.close()
        except TrserveError as error:
            log.warning("link %s: %s", self.medium.name, error)


def open_device_links(
    plan: ServerPlan, slab: Slab, index: int, names: Sequence[str], leaving: ExitStack
) -> DeviceLinks | None:
    """The links ``names`` of :func:`links_of`, closed with ``leaving``; None where there are none.

    Raises:
        StartupError: one that was asked for is refused.
    """
    if not names:
        return None
    links = DeviceLinks(plan, slab, index, names)
    leaving.callback(links.close)
    return links
