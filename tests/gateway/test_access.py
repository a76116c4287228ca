"""Keys, what each may do, and how much it may have."""

from __future__ import annotations

from typing import Any

import pytest

from trserve.endpoint_plan import EndpointPlan
from trserve.errors import RequestError
from trserve.gateway.access import ADMIN, ANYONE, PROBES, Access, Account
from trserve.keys import digest

CHAT = "/v1/chat/completions"
ROUTING = "/v1/trserve/routing"


def access(**changes: Any) -> Access:
    keys = {"api_keys": (digest("one"), digest("two")), "admin_key": digest("boss")}
    return Access(EndpointPlan(**{**keys, **changes}))


def bearer(key: str) -> list[bytes]:
    return [b"Bearer " + key.encode()]


def refused(found: Access, path: str, sent: list[bytes], query: bytes = b"") -> int:
    with pytest.raises(RequestError) as caught:
        found.check(path, query, sent)
    return caught.value.status


@pytest.mark.parametrize("path", [CHAT, "/tokenize", "/version", "/v1/models", "/no-route"])
def test_everything_but_probes_and_metrics_takes_a_key(path: str) -> None:
    a = access()
    for sent in (
        [],
        [b""],
        [b"Bearer"],
        [b"Bearer "],
        bearer("three"),
        bearer("on"),
        bearer("one "[:2]),
        [b"Basic one"],
        [b"one"],
        bearer("one") * 2,
        bearer("\xff"),
    ):
        assert refused(a, path, sent) == 401
    assert a.check(path, b"", bearer("one")).name == "key-1"
    assert a.check(path, b"", [b"bearer  two "]).name == "key-2"
    assert a.check(path, b"", bearer("boss")).name == ADMIN


@pytest.mark.parametrize("path", sorted(PROBES))
def test_probes_are_open_but_a_deep_check_is_not(path: str) -> None:
    a = access(protect_metrics=True)
    assert a.check(path, b"", []).name == ANYONE
    assert a.check(path, b"x=1", bearer("wrong")).name == ANYONE
    for query in (b"deep=1", b"%64eep=1", b"x&de%65p=%31"):
        assert refused(a, path, [], query) == 401
        assert a.check(path, query, bearer("one")).name == "key-1"


def test_metrics_are_open_unless_protected() -> None:
    assert access().check("/metrics", b"", []).name == ANYONE
    assert refused(access(protect_metrics=True), "/metrics", []) == 401


def test_only_the_admin_may_administer() -> None:
    assert access().check(ROUTING, b"", bearer("boss")).name == ADMIN
    assert refused(access(), ROUTING, bearer("one")) == 403
    assert refused(access(), ROUTING, []) == 401
    assert refused(access(admin_key=None), ROUTING, bearer("one")) == 403
    keyless = access(api_keys=())
    assert keyless.check(CHAT, b"", []).name == ANYONE
    assert keyless.check(CHAT, b"", bearer("dummy")).name == ANYONE
    assert refused(keyless, ROUTING, bearer("dummy")) == 401
    assert keyless.check(ROUTING, b"", bearer("boss")).name == ADMIN


def test_every_key_is_compared_whichever_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []

    def compare(ours: str, sent: str) -> bool:
        compared.append(ours)
        return ours == sent

    monkeypatch.setattr("trserve.gateway.access.hmac.compare_digest", compare)
    for key in ("one", "wrong"):
        compared.clear()
        with_key = bearer(key)
        if key == "wrong":
            refused(access(), CHAT, with_key)
        else:
            access().check(CHAT, b"", with_key)
        assert len(compared) == 3


def test_requests_of_one_key_at_once() -> None:
    account = Account("key-1", most_requests=2)
    account.enter(5)
    account.enter(5)
    with pytest.raises(RequestError) as caught:
        account.enter(5)
    assert (caught.value.status, caught.value.retry_after) == (429, 1)
    account.leave(3)
    account.enter(5)
    assert account.num_requests == 2


def test_tokens_a_minute_are_a_bucket_that_fills() -> None:
    now = 0.0
    account = Account("key-1", tokens_per_minute=60, clock=lambda: now)
    account.enter(40)
    with pytest.raises(RequestError) as caught:
        account.enter(30)
    assert (caught.value.status, caught.value.retry_after) == (429, 10)
    assert "60 tokens a minute" in caught.value.message
    now = 10.0
    account.enter(30)
    account.leave(15)  # the answers' tokens are a debt
    account.leave(5)
    now = 20.0
    with pytest.raises(RequestError) as caught:
        account.enter(1)
    assert caught.value.retry_after == 11
    now = 31.0
    account.enter(1)


def test_a_prompt_of_more_than_a_minute_waits_for_a_whole_one() -> None:
    now = 0.0
    account = Account("key-1", tokens_per_minute=60, clock=lambda: now)
    account.enter(100)
    account.leave(0)
    with pytest.raises(RequestError) as caught:
        account.enter(100)
    assert caught.value.retry_after == 100
    now = 100.0
    account.enter(100)


def test_keys_have_limits_of_their_own_and_the_admin_none() -> None:
    a = access(max_requests_per_key=1)
    for key in ("one", "two"):
        a.check(CHAT, b"", bearer(key)).enter(1)
        with pytest.raises(RequestError, match="as many as it may"):
            a.check(CHAT, b"", bearer(key)).enter(1)
    for _ in range(3):
        a.check(CHAT, b"", bearer("boss")).enter(1)
