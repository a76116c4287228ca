"""One request that a server fails at stops others once; one that fails for all is unreachable."""

import time

import pytest

from tests.edge.openai.stub import answer_of, wait, wrote
from tests.edge.openai.visits import visit
from trserve.edge.openai_calls import Outcome
from trserve.edge.openai_failures import Failures, may_be_own
from trserve.ipc.baton import Finish

POISON = 666
FAILED = (500, {"message": "Out of range float values are not JSON compliant"})


def again_when_connected(cloud, held, enough):
    """Give the visits in ``held`` whenever the server can be reached, as an agent does.

    One that comes back without a token comes again, two hops later.
    """
    connections = 0

    def look(answers):
        nonlocal connections
        while answers:
            answer = answers.pop(0)
            back = held.pop(answer.session)
            if answer.empty:
                held[answer.session] = back._replace(hop=back.hop + 2)
                cloud.visit(held[answer.session])
        if cloud.connections != connections:
            connections = cloud.connections
            for each in held.values():
                cloud.visit(each)
        return enough()

    wait(cloud, look)


@pytest.mark.parametrize("failed", [FAILED, (503, {"message": "down"})])
def test_others_are_answered_although_one_fails_at_every_visit(stub, cloud, failed):
    """They are slower than it fails, so that it must not take them along each time."""

    def serve(handler):
        if handler.body["prompt"] == [POISON]:
            return failed
        time.sleep(0.4)
        return wrote(5)

    stub.script = [serve] * 5000
    held = {1: visit([POISON], session=1), 2: visit([1], session=2), 3: visit([2], session=3)}
    again_when_connected(cloud, held, lambda: 2 not in held and 3 not in held)
    assert cloud.connections == 2 and held[1].hop > 1


def test_a_request_of_this_model_alone_that_fails_again_ends(stub, cloud):
    stub.script = [FAILED] * 2
    cloud.visit(visit([POISON], pinned=True))
    wait(cloud, lambda _: not cloud.connected)
    wait(cloud, lambda _: cloud.connected)
    cloud.visit(visit([POISON], pinned=True))
    assert answer_of(cloud).finish is Finish.WORKER_LOST
    assert cloud.connected


def test_a_server_that_fails_for_everybody_stays_unreachable(stub, cloud):
    """Although it still says what it serves, and although every visit ends in the end."""
    stub.script = [FAILED] * 5000
    held = {n: visit([n], session=n) for n in (1, 2, 3)}
    again_when_connected(cloud, held, lambda: cloud.connections == 4 and not cloud.connected)
    assert len(stub.asked) < 50, "it is left alone between probes"


def test_a_first_visit_that_is_refused_is_not_refused_for_ever(stub, cloud):
    """Nothing was answered yet and nothing else is under way, so nobody else can tell."""
    refused = (400, {"message": "no such bias"})
    stub.script = [refused] * 2 + [wrote(6)]
    cloud.visit(visit([1]))
    wait(cloud, lambda _: not cloud.connected)
    assert cloud.refused
    wait(cloud, lambda _: cloud.connected)
    cloud.visit(visit([1]))
    answer = answer_of(cloud)
    assert (len(answer.ids), answer.destination, answer.empty) == (0, 0, True)
    cloud.visit(visit([1, 2], hop=3))
    assert answer_of(cloud).ids.tolist() == [6]
    assert cloud.connections == 2


def test_what_a_session_failed_at_is_forgotten_with_it(stub, cloud):
    stub.script = [FAILED] * 2
    cloud.visit(visit([POISON]))
    wait(cloud, lambda _: not cloud.connected)
    cloud.end(1)
    wait(cloud, lambda _: cloud.connected)
    cloud.visit(visit([POISON]))
    wait(cloud, lambda _: not cloud.connected)
    assert cloud.connections == 2


def test_a_failure_counts_again_once_the_session_was_answered():
    failures = Failures()
    assert [failures.is_own(1, 1, answers=0, others=()) for _ in range(2)] == [False, True]
    assert failures.is_own(1, 3, answers=0, others=(2,)), "the other will tell"
    assert failures.is_own(1, 5, answers=1, others=()), "somebody was answered since"
    assert not failures.is_own(1, 7, answers=1, others=())
    failures.forget(1)
    assert not failures.is_own(1, 7, answers=1, others=(2,))
    assert not failures.is_own(2, 1, answers=1, others=(1,))


def test_that_nobody_answers_or_is_too_busy_is_no_request_s_fault():
    told = [(0, None), (401, None), (429, None), (503, 1.0), (503, None), (500, None), (400, None)]
    found = [may_be_own(Outcome(1, status, b"", "", after)) for status, after in told]
    assert found == [False, False, False, False, True, True, True]
