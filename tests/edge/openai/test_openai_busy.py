"""Visits that a server is too busy for, and calls that take too long."""

import socket
import threading
import time

import pytest

from tests.edge.openai.stub import LIMIT_S, answer_of, answers_of, wait, wrote
from tests.edge.openai.visits import visit
from trserve.edge import openai_calls
from trserve.edge.openai_busy import LONGEST_PAUSE_S, LONGEST_SAID_S, MOST_IN_VAIN, Busy
from trserve.edge.openai_calls import Calls, Server
from trserve.edge.openai_cloud import OpenAiCloud
from trserve.edge.openai_facts import ask_openai

TOO_MANY = (429, {"message": "too many"})


def test_more_visits_than_the_server_takes_at_once_are_all_answered(stub, cloud):
    lock, running, most = threading.Lock(), [0], 4

    def serve(handler):
        with lock:
            running[0] += 1
            taken = running[0] <= most
        time.sleep(0.05)
        with lock:
            running[0] -= 1
        return wrote(5) if taken else TOO_MANY

    stub.script = [serve] * 200
    for session in range(1, 13):
        cloud.visit(visit([session], session=session))
    assert {answer.session for answer in answers_of(cloud, 12)} == set(range(1, 13))
    assert cloud.connections == 1 and len(stub.asked) > 12


def test_the_pause_that_a_server_asks_for_is_kept(stub, cloud):
    stub.script = [(*TOO_MANY, {"Retry-After": "1"}), wrote(5)]
    began = time.monotonic()
    cloud.visit(visit([1]))
    assert answer_of(cloud).ids.tolist() == [5]
    assert time.monotonic() - began >= 1.0
    assert cloud.connections == 1


def test_one_that_is_busy_with_others_cannot_be_reached(stub, cloud):
    stub.script = [TOO_MANY] * 9
    cloud.visit(visit([1]))
    wait(cloud, lambda _: not cloud.connected)
    assert len(stub.asked) == MOST_IN_VAIN + 1
    assert "answers 429: too many" in cloud.reason and not cloud.refused
    wait(cloud, lambda _: cloud.connected)
    cloud.visit(visit([1]))
    wait(cloud, lambda _: not cloud.connected)
    assert len(stub.asked) == MOST_IN_VAIN + 2, "it has not answered since"
    wait(cloud, lambda _: cloud.connected)
    stub.script = [wrote(5), TOO_MANY, wrote(6)]
    cloud.visit(visit([1]))
    answer_of(cloud)
    cloud.visit(visit([1, 5], hop=3))
    assert answer_of(cloud).ids.tolist() == [6]


def test_one_that_asks_for_a_long_pause_cannot_be_reached(stub, cloud):
    stub.script = [(*TOO_MANY, {"Retry-After": "3600"})]
    cloud.visit(visit([1]))
    wait(cloud, lambda _: not cloud.connected)
    assert len(stub.asked) == 1


@pytest.mark.parametrize("said", [None, "soon", "-1"])
def test_one_that_is_unavailable_and_names_no_pause_cannot_be_reached(stub, cloud, said):
    stub.script = [(503, {"message": "down"}, {"Retry-After": said} if said else {})]
    cloud.visit(visit([1]))
    wait(cloud, lambda _: not cloud.connected)
    assert len(stub.asked) == 1


def test_a_visit_that_is_over_is_not_asked_for_again(stub, cloud):
    stub.script = [TOO_MANY, wrote(5), wrote(6)]
    cloud.visit(visit([1]))
    wait(cloud, lambda _: len(stub.asked) == 1)
    time.sleep(0.05)
    cloud.poll(time.monotonic())
    cloud.end(1)
    cloud.visit(visit([2], session=2))
    assert answer_of(cloud).session == 2
    time.sleep(0.5)
    assert cloud.poll(time.monotonic()) == [] and len(stub.asked) == 2


def test_pauses_grow_and_are_bounded():
    busy, now, pauses = Busy(), 100.0, []
    for _ in range(8):
        assert busy.put_off(1, 0.0, now, alone=False)
        pauses.append(busy.due_s(now))
        now += pauses[-1]
        assert busy.due(now - 0.001) == [] and busy.due(now) == [1] and busy.due(now) == []
    assert pauses[:4] == pytest.approx([0.25, 0.5, 1.0, 2.0])
    assert max(pauses) == pytest.approx(LONGEST_PAUSE_S)
    assert busy.put_off(2, 3600.0, now, alone=False)
    assert busy.due_s(now) == pytest.approx(LONGEST_SAID_S)
    busy.forget(2)
    assert busy.due_s(now) == float("inf")


# -- time ----------------------------------------------------------------------------------------


@pytest.fixture
def trickle():
    """The URL of a server whose answers come byte by byte, for ever."""
    listening, over = socket.create_server(("127.0.0.1", 0)), threading.Event()

    def serve(connection):
        with connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
            while not over.wait(0.02):
                try:
                    connection.sendall(b"x")
                except OSError:
                    return

    def accept():
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    over.set()
    listening.close()


def outcomes_of(calls, count):
    found, deadline = [], time.monotonic() + LIMIT_S
    while len(found) < count:
        assert time.monotonic() < deadline
        time.sleep(min(0.01, calls.due_s()))
        found += calls.outcomes()
    return found


def test_an_answer_that_trickles_in_has_no_more_time_than_another(trickle):
    calls = Calls(Server(trickle), {})
    began = time.monotonic()
    number = calls.begin("/v1/completions", b"{}", 0.4)
    time.sleep(0.1)
    assert calls.due_s() == pytest.approx(0.3, abs=0.1)
    ((found, status, _, error, _),) = outcomes_of(calls, 1)
    assert (found, status, error) == (number, 0, "no answer came in time")
    assert 0.35 < time.monotonic() - began < 1.5
    assert calls.due_s() == float("inf")
    calls.close()
    assert time.monotonic() - began < 3.0, "nor does its thread"


def test_a_plan_does_not_wait_for_one_either(trickle, monkeypatch):
    monkeypatch.setattr("trserve.edge.openai_facts.PROBE_TIMEOUT_S", 0.3)
    with pytest.raises(ConnectionError, match="in time"):
        ask_openai(trickle, "big", "")


def test_the_time_of_a_call_begins_when_it_does(stub, monkeypatch):
    monkeypatch.setattr(openai_calls, "MAX_CONNECTIONS", 1)
    calls = Calls(Server(stub.url), {})
    stub.script = [lambda handler: time.sleep(0.6) or wrote(5)] * 2
    for _ in range(2):
        calls.begin("/v1/completions", b"{}", 1.0)
    assert calls.due_s() < 1.0
    assert [outcome.status for outcome in outcomes_of(calls, 2)] == [200, 200]
    calls.close()


def test_one_that_was_cancelled_while_it_waited_is_not_made(stub, monkeypatch):
    monkeypatch.setattr(openai_calls, "MAX_CONNECTIONS", 1)
    calls = Calls(Server(stub.url), {})
    stub.script = [lambda handler: time.sleep(0.2) or wrote(5), wrote(6), wrote(7)]
    calls.begin("/first", b"{}", 5.0)
    calls.cancel(calls.begin("/second", b"{}", 5.0))
    calls.begin("/third", b"{}", 5.0)
    outcomes_of(calls, 2)
    calls.close()
    assert [path for path, _ in stub.asked] == ["/first", "/third"]


def test_a_request_whose_own_time_is_over_takes_nothing_from_others(stub, cloud):
    gate = threading.Event()
    stub.script = [
        lambda handler: gate.wait(LIMIT_S) and wrote(5),
        lambda handler: gate.wait(LIMIT_S) and wrote(6),
    ]
    cloud.visit(visit([1], session=1))
    wait(cloud, lambda _: len(stub.asked) == 1)
    deadline_ns = time.monotonic_ns() + 200_000_000
    cloud.visit(visit([2], session=2)._replace(deadline_ns=deadline_ns))
    until = time.monotonic() + 0.6
    assert wait(cloud, lambda _: time.monotonic() > until) == []
    gate.set()
    answer = answer_of(cloud)
    assert (answer.session, answer.ids.tolist(), cloud.connections) == (1, [5], 1)


def test_a_server_that_trickles_is_one_that_cannot_be_reached(trickle, monkeypatch):
    monkeypatch.setattr("trserve.edge.openai_cloud.PROBE_TIMEOUT_S", 0.3)
    cloud = OpenAiCloud(trickle)
    cloud.start(time.monotonic())
    wait(cloud, lambda _: "in time" in cloud.reason)
    cloud.close()
