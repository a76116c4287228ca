"""What an edge port has to say when there is no room to: it is said later, or holds no more."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.edge.link.joined import joined
from tests.edge.link.test_hostile import to_port
from tests.edge.link.test_joined import PROMPTS, ROUTER
from tests.edge.link.test_lost_answers import check_alone, handoffs, pinned
from tests.workers.fakes import VOCAB
from trserve.edge.wire import FrameType
from trserve.ipc.baton import Finish, SlotState


@pytest.fixture(params=["grammar", "sessions", "parameters"])
def refusing(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What to ask for that the far side refuses."""
    sessions = "trserve.edge.port_sessions.PortSessions."
    if request.param == "grammar":
        monkeypatch.setattr(sessions + "_can_follow", lambda *_: False)
    if request.param == "sessions":
        monkeypatch.setattr(sessions + "_has_room", lambda *_: False)
    yield {"stop_token_ids": (VOCAB,)} if request.param == "parameters" else {}


def test_a_refusal_for_which_there_is_no_room_is_said_when_there_is(
    refusing: dict[str, Any],
) -> None:
    with joined(router=ROUTER) as j:
        slot = pinned(j, **refusing)
        j.network.room = 0
        j.turns(3)
        assert j.home.world.baton(slot).state is SlotState.LIVE
        j.network.room = 10**9
        j.turns(3)
        assert j.home.world.baton(slot).finish is Finish.WORKER_LOST
        assert len(handoffs(j)) == 1, "nothing was asked twice"
        assert len(j.far.sessions._unsaid) == 0


def test_what_could_not_be_said_is_forgotten_with_its_request(refusing: dict[str, Any]) -> None:
    for over in (True, False):
        with joined(router=ROUTER) as j:
            slot = pinned(j, **refusing)
            j.network.room = 0
            j.turns(2)
            assert len(j.far.sessions._unsaid) == 1
            if over:
                j.home.world.slots.cancel(slot)
            else:
                j.network.up = False
                j.network.cut()
            j.turns(3)
            j.turn(4.0)
            j.turn()
            assert len(j.far.sessions._unsaid) == 0


def test_a_refusal_that_holds_no_more_is_not_said() -> None:
    with joined(router=ROUTER) as j:
        slot = pinned(j)
        j.far.sessions._can_follow = lambda session: False
        j.network.room = 0
        j.turns(2)
        del j.far.sessions._can_follow
        (again,) = [frame for frame in j.network.sent if frame[0] == FrameType.HANDOFF]
        to_port(j, again)
        j.turns(2)
        j.network.room = 10**9
        j.run(slot)
        check_alone(j, slot, len(PROMPTS[0]))
