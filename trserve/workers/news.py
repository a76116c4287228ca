"""Whether the slab says that something happened to workers since somebody last looked.

Knows two kinds of words: how many workers were reaped, and how often a model at another host became
reachable, or ceased to be. Not what follows from either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from trserve.ipc.fence import load_fence
from trserve.ipc.layout import EPOCH_WORD, WORKER_WORDS
from trserve.ipc.slab import Slab

_CHANGES: Final = WORKER_WORDS.index("reach_changes")


class News:
    """What one process has seen of both.

    Args:
        remote: the models that are at another host; where there are none, nothing is read of them.
    """

    def __init__(self, slab: Slab, remote: Sequence[int] = ()) -> None:
        self._header = slab.header
        self._links = [slab.workers[worker].words for worker in remote]
        self._epoch = -1
        self._changes = -1

    @property
    def any(self) -> bool:
        """Whether there is any."""
        if self._header[EPOCH_WORD] != self._epoch:
            return True
        return bool(self._links) and self._count() != self._changes

    def note(self) -> None:
        """It is about to be looked at: what comes from now on is news again."""
        self._epoch = self._header[EPOCH_WORD]
        self._changes = self._count()
        load_fence()

    def _count(self) -> int:
        return sum(words[_CHANGES] for words in self._links)
