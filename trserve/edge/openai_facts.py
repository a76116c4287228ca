"""What a server that takes token ids says of its models, at ``/v1/models``; asked before a plan.

Knows that page; nothing of visits.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import orjson

from trserve.edge.facts import RemoteFacts
from trserve.edge.openai_calls import Calls, Outcome, Server
from trserve.edge.openai_wire import Dialect, WireError, dialect_of, refusal_of
from trserve.waiting import wait_readable

MODELS_PATH: Final = "/v1/models"
PROBE_TIMEOUT_S: Final = 10.0
_OK: Final = 200


class Served(NamedTuple):
    """The model that visits go to: its name, how it is asked, and what is known of it."""

    model: str
    dialect: Dialect
    facts: RemoteFacts | None


def read_served(body: bytes, wanted: str) -> Served | None:
    """The model called ``wanted``, else the first; None where there is none.

    Raises WireError for what is no list of models.
    """
    try:
        models = orjson.loads(body)
        served: list[dict[str, Any]] = models.get("data") or []
        named = [each for each in served if each.get("id") == wanted]
        chosen = next(iter(named or served), None)
        if chosen is None:
            return None
        length = chosen.get("max_model_len")
        length = length if type(length) is int and length > 0 else 0
        facts = RemoteFacts(max_model_len=length) if length else None
        return Served(str(chosen["id"]), dialect_of(models), facts)
    except (orjson.JSONDecodeError, AttributeError, TypeError, KeyError) as error:
        raise WireError(f"does not say what it serves ({error})") from None


def ask_openai(url: str, wanted: str, key: str) -> RemoteFacts | None:
    """What is known of the model of the server at ``url``; None where it does not say.

    Raises:
        ConfigError: ``url`` is none.
        ConnectionError: nobody answers, or not with a list of models; says why.
    """
    server = Server(url)
    outcome = _ask(server, {"Authorization": f"Bearer {key}"} if key else {})
    try:
        if not outcome.status:
            raise WireError(outcome.error)
        if outcome.status != _OK:
            raise WireError(f"answers {outcome.status}: {refusal_of(outcome.body)}")
        served = read_served(outcome.body, wanted)
    except WireError as error:
        raise ConnectionError(f"{server.url}: {error}") from None
    return served.facts if served is not None else None


def _ask(server: Server, headers: dict[str, str]) -> Outcome:
    calls = Calls(server, headers)
    try:
        calls.begin(MODELS_PATH, None, PROBE_TIMEOUT_S)
        while not (outcomes := calls.outcomes()):
            wait_readable(calls.fd, calls.due_s())
        return outcomes[0]
    finally:
        calls.close()
