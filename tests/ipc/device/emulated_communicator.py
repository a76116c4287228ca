"""The emulated communicators, and the words of their memory that tests look at and turn."""

from trserve.ipc.device.emulated_communicator import (
    EARLY_SENDS,
    PARTIAL,
    POSTED,
    STALL,
    EmulatedCommunicator,
    EmulatedCommunicators,
)

__all__ = [
    "EARLY_SENDS",
    "PARTIAL",
    "POSTED",
    "STALL",
    "EmulatedCommunicator",
    "EmulatedCommunicators",
]
