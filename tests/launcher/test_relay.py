"""What the launcher only hands on: to whom, and to whom not."""

from __future__ import annotations

from types import SimpleNamespace

from trserve.relay import RELAYED, relay

CHILDREN = {
    name: SimpleNamespace(identity=name, ready=name != "worker-2")
    for name in ("gateway", "solver", "worker-0", "worker-1", "worker-2")
}


def sent(sender: str, **message) -> list[tuple[str, dict]]:
    found: list[tuple[str, dict]] = []
    control = SimpleNamespace(send=lambda identity, body: found.append((identity, body)))
    assert message["type"] in RELAYED
    relay(control, CHILDREN.values(), CHILDREN[sender], message)
    return found


def test_offers_go_unchanged_to_whom_they_are_for():
    offer = {"type": "link_offer", "from": 0, "to": 1, "life": 7, "handle": "ab"}
    assert sent("worker-0", **offer) == [("worker-1", offer)]


def test_a_worker_that_loads_is_offered_nothing_yet():
    """It makes an offer of its own once it serves, and that is answered."""
    assert sent("worker-0", type="link_offer", to=2) == []
    assert sent("worker-0", type="link_offer", to=9) == []


def test_the_gateways_go_to_workers_and_theirs_to_it():
    flush = {"type": "flush_cache", "number": 1}
    assert sent("gateway", **flush) == [("worker-0", flush), ("worker-1", flush)]
    done = {"type": "cache_flushed", "number": 1}
    assert sent("worker-1", **done) == [("gateway", done)]
