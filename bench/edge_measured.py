"""What one answer of the edge study is, whichever method wrote it. Knows no method."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Answer:
    """One answer, as whoever asked saw it.

    Attributes:
        times: seconds from asking to each token.
        routed: tokens that the LLM wrote.
        visits: how often the network was crossed and back for them.
        drawn: tokens that the SLM computed, those that were replaced too.
        compute_s, network_s, service_s: the parts of its time, as far as they are told apart.
        bytes: payload on the wire in both directions, first contact excluded.
        handoffs: crossings of the network that carried ``bytes``, there and back counted apart.
        frame_bytes, frames: of the link's own frames alone, as far as somebody counts them.
        text: the answer.
        token_ids: of the answer.
    """

    times: list[float] = field(default_factory=list)
    routed: int = 0
    visits: int = 0
    drawn: int = 0
    compute_s: float = 0.0
    network_s: float = 0.0
    service_s: float = 0.0
    bytes: int = 0
    handoffs: int = 0
    frame_bytes: int = 0
    frames: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return len(self.times)

    @property
    def total_s(self) -> float:
        """To its last token."""
        return self.times[-1] if self.times else 0.0


@dataclass(frozen=True)
class Means:
    """Over several answers; times in the unit of the name."""

    ttft_ms: float
    tbt_ms: float | None
    total_s: float
    routed: float
    visits: float
    tokens: float
    drawn: float
    compute_s: float
    network_s: float
    service_s: float
    bytes_per_handoff: float | None
    frame_bytes_per_handoff: float | None


def means(answers: Sequence[Answer]) -> Means:
    """Of one or more answers. Gaps between tokens are of all of them together."""
    gaps = [a.tokens - 1 for a in answers]
    lasted = sum(a.total_s - a.times[0] for a in answers)
    handoffs, frames = (sum(getattr(a, n) for a in answers) for n in ("handoffs", "frames"))

    def mean(name: str) -> float:
        return statistics.fmean(getattr(a, name) for a in answers)

    return Means(
        ttft_ms=1e3 * statistics.fmean(a.times[0] for a in answers),
        tbt_ms=1e3 * lasted / sum(gaps) if sum(gaps) else None,
        total_s=mean("total_s"),
        routed=mean("routed"),
        visits=mean("visits"),
        tokens=mean("tokens"),
        drawn=mean("drawn"),
        compute_s=mean("compute_s"),
        network_s=mean("network_s"),
        service_s=mean("service_s"),
        bytes_per_handoff=sum(a.bytes for a in answers) / handoffs if handoffs else None,
        frame_bytes_per_handoff=sum(a.frame_bytes for a in answers) / frames if frames else None,
    )
