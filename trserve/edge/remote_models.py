"""What the hosts of a configuration's remote models say of them, asked once before it is planned.

Knows which hosts to ask; nothing of how they are asked.
"""

from __future__ import annotations

from collections.abc import Sequence

from trserve.config import LaunchConfig
from trserve.edge.facts import RemoteFacts
from trserve.places import Place


def ask_hosts(config: LaunchConfig, places: Sequence[Place]) -> list[RemoteFacts | None]:
    """What is known of each model; None for those here, and for hosts that do not say."""
    return [None] * len(places)
