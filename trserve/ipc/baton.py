"""The baton word: who may write a request, how much of it is final, and whether it is over.

Pure arithmetic on one 63-bit integer. Knows nothing of shared memory or processes.

Bits, from the most significant: ``length:28 | owner:6 | state:3 | finish:3 | bank:1 | hop:22``.
Committing tokens, naming the next owner and finishing are one aligned 8-byte store of this word,
so that no crash point lies between two of them. The sign bit stays clear.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final, NamedTuple

HOP_BITS: Final = 22
BANK_SHIFT: Final = HOP_BITS
FINISH_SHIFT: Final = BANK_SHIFT + 1
STATE_SHIFT: Final = FINISH_SHIFT + 3
OWNER_SHIFT: Final = STATE_SHIFT + 3
LENGTH_SHIFT: Final = OWNER_SHIFT + 6

ONE_TOKEN: Final = 1 << LENGTH_SHIFT
"""What a word grows by when its holder commits a token and keeps it."""

WITHOUT_LENGTH: Final = ONE_TOKEN - 1
"""Mask of all the other fields."""

MAX_LENGTH: Final = (1 << 28) - 1
MAX_OWNER: Final = (1 << 6) - 1
MAX_HOP: Final = (1 << HOP_BITS) - 1
HOP_MASK: Final = MAX_HOP
STATE_MASK: Final = 7 << STATE_SHIFT
FINISH_MASK: Final = 7 << FINISH_SHIFT


class SlotState(IntEnum):
    """Life of a slot: FREE → FILLING (gateway) → LIVE → DONE (baton holder) → FREE (gateway)."""

    FREE = 0
    FILLING = 1
    LIVE = 2
    DONE = 3


class Finish(IntEnum):
    """Why a request is over. Stop strings are the gateway's and appear here as ABORT."""

    NONE = 0
    STOP = 1  # an end-of-sequence or stop token was committed; it is the last of the row
    LENGTH = 2
    ABORT = 3
    ROUTER_ERROR = 4
    NUMERIC_ERROR = 5  # the model's logits were not finite
    WORKER_LOST = 6
    WORKER_CRASHED = 7  # the request ended a worker, and its successor too


class Baton(NamedTuple):
    """The word, unpacked."""

    length: int
    owner: int
    state: SlotState
    finish: Finish
    bank: int
    hop: int

    def pack(self) -> int:
        """The 63-bit word. Raises ValueError for a field that does not fit."""
        return pack(self.length, self.owner, self.state, self.finish, self.bank, self.hop)


def pack(length: int, owner: int, state: int, finish: int, bank: int, hop: int) -> int:
    """The word of these fields. Raises ValueError for one that does not fit its bits."""
    if not (
        0 <= length <= MAX_LENGTH
        and 0 <= owner <= MAX_OWNER
        and 0 <= hop <= MAX_HOP
        and 0 <= state <= 7
        and 0 <= finish <= 7
        and 0 <= bank <= 1
    ):
        raise ValueError(
            f"baton fields out of range: {length=} {owner=} {state=} {finish=} {bank=} {hop=}"
        )
    return (
        length << LENGTH_SHIFT
        | owner << OWNER_SHIFT
        | state << STATE_SHIFT
        | finish << FINISH_SHIFT
        | bank << BANK_SHIFT
        | hop
    )


_LIVE_BITS: Final = int(SlotState.LIVE) << STATE_SHIFT
OWNER_AND_STATE: Final = MAX_OWNER << OWNER_SHIFT | STATE_MASK
"""Mask of the fields that say whose the request is."""


def live_of(owner: int) -> int:
    """What :data:`OWNER_AND_STATE` leaves of a word while ``owner`` has the request."""
    return owner << OWNER_SHIFT | _LIVE_BITS


def hand_over(word: int, owner: int, hop: int) -> int:
    """The word that gives a live request to ``owner``, in the other bank.

    Args:
        word: the one of the worker that has it, whose hop is ``hop - 1``.

    Raises ValueError when a word has no room for one more hop.
    """
    if hop > MAX_HOP:
        raise ValueError(f"a request was handed off {MAX_HOP} times")
    return (word & _STAYS_AT_HOP ^ _OTHER_BANK) | owner << OWNER_SHIFT | hop


_STAYS_AT_HOP: Final = (MAX_LENGTH << LENGTH_SHIFT) | STATE_MASK | 1 << BANK_SHIFT
_OTHER_BANK: Final = 1 << BANK_SHIFT

# By value, all from 0 on. SlotState(...), Finish(...) and Baton(...) would check what is known:
# three quarters of an unpacking, and a worker unpacks a word for every descriptor.
_STATES: Final = tuple(SlotState)
_FINISHES: Final = tuple(Finish)
_new: Final = tuple.__new__


def unpack(word: int) -> Baton:
    """The fields of ``word``. Raises ValueError for a state or finish that is none."""
    try:
        fields = (
            word >> LENGTH_SHIFT,
            word >> OWNER_SHIFT & MAX_OWNER,
            _STATES[word >> STATE_SHIFT & 7],
            _FINISHES[word >> FINISH_SHIFT & 7],
            word >> BANK_SHIFT & 1,
            word & HOP_MASK,
        )
    except IndexError:
        raise ValueError(f"{word:#x} is no baton word: its state or finish is none") from None
    return _new(Baton, fields)
