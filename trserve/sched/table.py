"""B*(N): the batch thresholds for every number of live requests, each row feasible.

Knows nothing of how the thresholds were chosen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trserve.sched.vectors import Vector, is_feasible


class ThresholdTable:
    """Thresholds by N. Immutable; every row is feasible for its N and for all larger ones."""

    def __init__(self, models: int, rows: Mapping[int, Sequence[int]]) -> None:
        """``rows``: N -> vector, for any of the N. Between them the next smaller N's row holds,
        below the first one eager execution. Raises ValueError for a row that is not feasible."""
        self._models = models
        self._known = {n: tuple(rows[n]) for n in sorted(rows)}
        for n, row in self._known.items():
            if len(row) != models or not is_feasible(row, n):
                raise ValueError(f"thresholds {row} are not feasible at concurrency {n}")
        self._rows: list[Vector] = [(1,) * models]
        for n in range(1, max(self._known, default=0) + 1):
            self._rows.append(self._known.get(n, self._rows[-1]))

    @classmethod
    def eager(cls, models: int) -> ThresholdTable:
        """B = 1 everywhere."""
        return cls(models, {})

    @classmethod
    def fixed(cls, vector: Sequence[int]) -> ThresholdTable:
        """One vector wherever it is feasible; below that, its largest entries are lowered."""
        row = list(vector)
        rows = {}
        for n in range(sum(row) - len(row) + 1, 0, -1):
            rows[n] = tuple(row)
            if max(row) > 1:
                row[row.index(max(row))] -= 1
        return cls(len(row), rows)

    @classmethod
    def from_rows(cls, models: int, rows: Mapping[str, Sequence[int]]) -> ThresholdTable:
        """The table with these ``rows``, whose N are text, as messages have them."""
        return cls(models, {int(n): row for n, row in rows.items()})

    @property
    def models(self) -> int:
        return self._models

    @property
    def is_eager(self) -> bool:
        """Whether B = 1 everywhere."""
        return all(max(row) == 1 for row in self._rows)

    @property
    def rows(self) -> dict[int, Vector]:
        """The rows that were given."""
        return dict(self._known)

    def row(self, live: int) -> Vector:
        """The thresholds for ``live`` requests."""
        return self._rows[min(max(live, 0), len(self._rows) - 1)]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ThresholdTable) and self._rows == other._rows

    def __hash__(self) -> int:
        return hash(tuple(self._rows))

    def __repr__(self) -> str:
        return f"ThresholdTable({self._models}, {self._known})"
