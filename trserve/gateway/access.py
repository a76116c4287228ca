"""Who may ask for what: keys, compared in constant time, and how much each key may have.

Knows digests, paths and an ``Authorization`` header; no key, no response and no log.
"""

from __future__ import annotations

import hmac
import math
import time
from collections.abc import Callable
from typing import Final
from urllib.parse import parse_qs

from trserve.endpoint_plan import EndpointPlan
from trserve.errors import RequestError
from trserve.gateway import page_routes
from trserve.keys import digest

PROBES: Final = frozenset(("/livez", "/readyz", "/health", "/ping"))
METRICS: Final = "/metrics"
ADMIN_PATHS: Final = frozenset(("/v1/trserve/routing",))
ADMIN: Final = "admin"
ANYONE: Final = "anyone"
_SCHEME: Final = b"bearer "


class Account:
    """What one key has in the server, and what it may still have.

    The tokens of a prompt are taken when it gets in, those of its answer when it has ended: an
    answer's length is known then. A debt is paid off before the next request gets in.

    Args:
        name: what the log calls the key.
        most_requests: at once; 0 for no limit.
        tokens_per_minute: 0 for no limit; a minute's tokens may be taken at once.
    """

    def __init__(
        self,
        name: str,
        most_requests: int = 0,
        tokens_per_minute: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.num_requests = 0
        self._most_requests = most_requests
        self._most_tokens = float(tokens_per_minute)
        self._clock = clock
        self._balance = self._most_tokens
        self._counted_at = clock()

    def enter(self, prompt_tokens: int) -> None:
        """One more request gets in; RequestError (429) says when it may."""
        if self._most_requests and self.num_requests >= self._most_requests:
            raise RequestError(
                f"this key has {self.num_requests} requests in the server, as many as it may; "
                "wait for one to end",
                status=429,
                code="too_many_requests",
                retry_after=1,
            )
        if self._most_tokens:
            self._take_prompt(prompt_tokens)
        self.num_requests += 1

    def _take_prompt(self, tokens: int) -> None:
        now, rate = self._clock(), self._most_tokens / 60
        self._balance = min(self._most_tokens, self._balance + (now - self._counted_at) * rate)
        self._counted_at = now
        # A prompt of more than a minute's tokens gets in when a whole minute's are there.
        missing = min(tokens, self._most_tokens) - self._balance
        if missing > 0:
            raise RequestError(
                f"this key's {self._most_tokens:.0f} tokens a minute are used up; try again later",
                status=429,
                code="tokens_exhausted",
                retry_after=math.ceil(missing / rate),
            )
        self._balance -= tokens

    def leave(self, completion_tokens: int) -> None:
        """A request that got in has ended with so many tokens."""
        self.num_requests -= 1
        if self._most_tokens:
            self._balance -= completion_tokens


def asks_deep(query: bytes) -> bool:
    """Whether the query of a probe asks for a check that computes something."""
    return "1" in parse_qs(query.decode("latin-1")).get("deep", ())


class Access:
    """The keys of an endpoint."""

    def __init__(self, plan: EndpointPlan) -> None:
        limits = plan.max_requests_per_key, plan.tokens_per_minute
        self._anyone = Account(ANYONE, *limits)
        self._accounts = [
            (key, Account(f"key-{number}", *limits)) for number, key in enumerate(plan.api_keys, 1)
        ]
        self._has_admin = plan.admin_key is not None
        self._asks = bool(self._accounts)
        if plan.admin_key is not None:
            self._accounts.append((plan.admin_key, Account(ADMIN)))
        self._open = PROBES if plan.protect_metrics else PROBES | {METRICS}
        if plan.ui:  # the page itself asks for the key
            self._open |= page_routes.PATHS

    def check(self, path: str, query: bytes, authorizations: list[bytes]) -> Account:
        """Whose request it is.

        Raises:
            RequestError: 401, no key or none of ours; 403, a key that may not do this.
        """
        account = self._known(authorizations)
        if path in ADMIN_PATHS:
            return self._check_admin(account)
        if account is None:
            # A deep check computes something, which a probe must not let anybody have.
            is_open = path in self._open and not asks_deep(query)
            if self._asks and not is_open:
                raise _unauthorized(authorizations)
            return self._anyone
        return account

    def _check_admin(self, account: Account | None) -> Account:
        if not self._has_admin:
            raise RequestError(
                "this server has no admin key, so nobody can see or change its routing here; "
                "start it with --admin-key",
                status=403,
                code="admin_disabled",
            )
        if account is None:
            raise RequestError(
                "this route takes the server's admin key as Authorization: Bearer KEY",
                status=401,
                code="invalid_api_key",
            )
        if account.name != ADMIN:
            raise RequestError(
                "this key may not do that; it takes the admin key", status=403, code="not_admin"
            )
        return account

    def _known(self, authorizations: list[bytes]) -> Account | None:
        """The account of the key that was sent; all are compared, whichever it is."""
        if len(authorizations) != 1 or not self._accounts:
            return None
        value = authorizations[0]
        if value[: len(_SCHEME)].lower() != _SCHEME:
            return None
        sent, found = digest(value[len(_SCHEME) :].strip()), None
        for key, account in self._accounts:
            if hmac.compare_digest(key, sent):
                found = account
        return found


def _unauthorized(authorizations: list[bytes]) -> RequestError:
    message = (
        "the API key is not one of this server's"
        if authorizations
        else "no API key was sent; send it as Authorization: Bearer KEY"
    )
    return RequestError(message, status=401, code="invalid_api_key")
