"""What a call that failed says: of its request, of the server, or that the server is busy.

A server that fails may do so because of what one request asks for: whoever fails again after the
server has answered a probe has failed of itself, and takes no others along from then on, as long as
others tell that the server works. Knows outcomes and numbers of sessions; no calls.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from trserve.edge.openai_calls import Outcome
from trserve.edge.openai_wire import refusal_of

_OK: Final = 200
_FOR_GOOD: Final = frozenset({401, 403, 404, 405})
_OF_ONE_REQUEST: Final = frozenset({400, 413, 422})
_TOO_MANY: Final = 429
_FAILED: Final = 500
_UNAVAILABLE: Final = 503


def problem_of(outcome: Outcome) -> str:
    """What is wrong with it; empty for an answer."""
    if not outcome.status:
        return outcome.error
    if outcome.status == _OK:
        return ""
    return f"answers {outcome.status}: {refusal_of(outcome.body)}"


def is_for_good(outcome: Outcome) -> bool:
    """Whether the server refuses whatever is asked of it."""
    return outcome.status in _FOR_GOOD


def is_refusal(outcome: Outcome) -> bool:
    """Whether it refuses what was asked, which asking again does not change."""
    return outcome.status in _OF_ONE_REQUEST


def is_too_busy(outcome: Outcome) -> bool:
    """Whether it is to be asked again later."""
    named_pause = outcome.retry_after_s is not None
    return outcome.status == _TOO_MANY or (outcome.status == _UNAVAILABLE and named_pause)


def may_be_own(outcome: Outcome) -> bool:
    """Whether it may be the request's own fault."""
    return is_refusal(outcome) or (outcome.status >= _FAILED and not is_too_busy(outcome))


class _Failed(NamedTuple):
    """A session's last failure: of the visit ``hop``, after so many ``answers`` to anybody."""

    hop: int
    answers: int
    own: bool


_NEVER: Final = _Failed(hop=-1, answers=0, own=False)


class Failures:
    """By session, until one of its visits is answered or it ends."""

    def __init__(self) -> None:
        self._failed: dict[int, _Failed] = {}

    def is_own(self, session: int, hop: int, answers: int, others: Iterable[int]) -> bool:
        """Whether a visit's failure is its own; else it tells that the server cannot be reached.

        A server that fails for everybody stays unreachable so: a session that has failed of itself
        takes the server along again where no other may still be answered, and none was since.

        Args:
            answers: how many the server has given to anybody.
            others: sessions whose calls are under way.
        """
        known = self._failed.get(session, _NEVER)
        again = known.hop == hop
        excused = known.own and (answers > known.answers or self._hope(others))
        self._failed[session] = _Failed(hop, answers, again or known.own)
        return again or excused

    def forget(self, session: int) -> None:
        """It was answered, or is over."""
        self._failed.pop(session, None)

    def _hope(self, others: Iterable[int]) -> bool:
        """Whether there is one among ``others`` that has not failed of itself."""
        return any(not self._failed.get(each, _NEVER).own for each in others)
