"""What a server that takes token ids says of its models, at ``/v1/models``; asked before a plan.

Knows that page; nothing of visits.
"""

from __future__ import annotations

import http.client
import ssl
from typing import Any, Final, NamedTuple

import orjson

from trserve.edge.facts import RemoteFacts
from trserve.edge.openai_calls import MAX_BODY, Server, explain
from trserve.edge.openai_wire import Dialect, WireError, dialect_of, refusal_of

MODELS_PATH: Final = "/v1/models"
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
    connection = server.connection()
    try:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        connection.request("GET", server.prefix + MODELS_PATH, headers=headers)
        response = connection.getresponse()
        body = response.read(MAX_BODY)
        if response.status != _OK:
            raise WireError(f"answers {response.status}: {refusal_of(body)}")
        served = read_served(body, wanted)
    except (OSError, http.client.HTTPException, ssl.SSLError, WireError) as error:
        reason = str(error) if isinstance(error, WireError) else explain(error)
        raise ConnectionError(f"{server.url}: {reason}") from None
    finally:
        connection.close()
    return served.facts if served is not None else None
