"""What went over a link between hosts. Knows no sockets and no frames."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class LinkCounts:
    """What went over the link; bytes are the frames' own, without those of TCP and CURVE.

    ``handoffs`` and ``answers`` count frames, ``contacts`` those handoffs that carried a request's
    parameters and prompt; ``bad_frames`` what was no frame, ``needs`` how often the other side had
    to ask for tokens that it no longer had. ``nccl_handoffs`` and ``nccl_answers`` are those whose
    ids went by NCCL; they count among the bytes of their frames.
    """

    handoffs: int = 0
    handoff_bytes: int = 0
    contacts: int = 0
    contact_bytes: int = 0
    answers: int = 0
    answer_bytes: int = 0
    needs: int = 0
    bad_frames: int = 0
    round_trip_us: int = 0
    nccl_handoffs: int = 0
    nccl_answers: int = 0

    def was_sent(self, size: int, *, contact: bool) -> None:
        """One more handoff of ``size`` bytes; ``contact``: with parameters and prompt."""
        if contact:
            self.contacts += 1
            self.contact_bytes += size
        else:
            self.handoffs += 1
            self.handoff_bytes += size
