"""Whether NCCL carries ids between hosts, and what of this machine it needs for that.

``--link nccl`` asks for it, on both sides. Everything that can be known before a process is started
is refused before; CuPy is imported only then. Knows plans; no connections.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from trserve.errors import ConfigError, StartupError
from trserve.gpus.plan import OWN_GPU, GpuPlan
from trserve.gpus.topology import VISIBLE
from trserve.ipc.device.choice import NCCL, missing_packages
from trserve.places import OPENAI, Place

if TYPE_CHECKING:
    from trserve.edge.nccl_side import NcclSide
    from trserve.plan import ServerPlan

log = logging.getLogger(__name__)
VARIABLE: Final = "TRSERVE_EMULATED_HOST_LINK"
"""Set to nccl, ids go between two servers of one host by communicators that are none, for tests."""

EMULATED: Final = "emulated nccl"


def crosses_hosts(places: Sequence[Place]) -> bool:
    """Whether a link of ours leads to another host; not so to a server of another kind."""
    return any(each.remote and not each.remote.startswith(OPENAI) for each in places)


def check_nccl(link: str, places: Sequence[Place], gpu: GpuPlan | None) -> None:
    """Refuse ``--link nccl`` between hosts where this one cannot do it.

    Args:
        link: what ``--link`` says.
        gpu: the GPUs of the models that are here; None for none.

    Raises:
        ConfigError: there is no GPU, no CuPy or no NCCL here.
    """
    if link != NCCL or not crosses_hosts(places):
        return
    why = "" if gpu is not None and any(gpu.uuids) else "no model is on a GPU here"
    why = why or missing_packages().get(NCCL, "")
    if not why:
        from trserve.ipc.device.cupy_communicator import why_no_nccl

        why = why_no_nccl()
    if why:
        raise ConfigError(
            f"--link nccl cannot carry ids to models at other hosts: {why}\nleave --link out, on "
            "both sides, and they travel by tcp"
        )


def open_nccl(plan: ServerPlan) -> NcclSide | None:
    """What this process has for NCCL; None where ids travel by tcp.

    On the GPU of the first model here, of which nothing else is seen: to be called before anything
    of CUDA.

    Raises:
        StartupError: the device, or an emulation that was asked for, cannot be had.
    """
    if emulated := os.environ.get(VARIABLE, ""):
        return _open_emulated(emulated)
    if plan.link != NCCL:
        return None
    from trserve.edge.nccl_side import NcclSide
    from trserve.gpus.mps_control import PIPE_DIRECTORY
    from trserve.gpus.side import DEVICE_ORDER
    from trserve.ipc.device.api import DeviceError
    from trserve.ipc.device.cuda_device import CudaDevice
    from trserve.ipc.device.cupy_communicator import CupyCommunicators

    os.environ[VISIBLE] = next(uuids[0] for uuids in plan.gpu.uuids if uuids)
    os.environ[DEVICE_ORDER] = "PCI_BUS_ID"
    # CUDA looks for an MPS daemon in a usual place; nobody else's is used, and ours has workers.
    os.environ[PIPE_DIRECTORY] = f"/proc/{os.getpid()}/no-mps"
    try:
        device = CudaDevice(OWN_GPU)
        side = NcclSide(device, CupyCommunicators(device), name=NCCL)
    except DeviceError as error:
        raise StartupError(
            f"--link nccl: {error}\nleave --link out, on both sides, and ids travel by tcp"
        ) from None
    shown = {name: text for name, text in os.environ.items() if name.startswith("NCCL_")}
    log.info("NCCL between hosts, on %s, with %s", os.environ[VISIBLE], shown)
    return side


def _open_emulated(wanted: str) -> NcclSide:
    from trserve.edge.nccl_side import NcclSide
    from trserve.ipc.device.cpu_device import CpuDevice
    from trserve.ipc.device.emulated_communicator import EmulatedCommunicators

    if wanted != NCCL:
        raise ConfigError(f"{VARIABLE}={wanted}: is {NCCL} or nothing, for tests")
    log.warning("ids between hosts go by %s: nothing here is NCCL, or a GPU", EMULATED)
    device = CpuDevice()
    return NcclSide(device, EmulatedCommunicators(device), name=EMULATED)
