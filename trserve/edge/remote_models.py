"""What the hosts of a configuration's remote models say of them, asked once before it is planned.

So that a row never grows beyond what a model elsewhere can hold, and its ends are ends here. Knows
frames of the greeting; no sessions and no slab.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import zmq

from trserve.config import LaunchConfig
from trserve.edge import frames, greeting
from trserve.edge.curve import ClientKeys, read_client_keys
from trserve.edge.dial import Connection
from trserve.edge.facts import RemoteFacts
from trserve.edge.wire import GREETING_BYTES, PROTOCOL_VERSION, FrameError, FrameType
from trserve.errors import ModelUnavailableError
from trserve.places import OPENAI, Place
from trserve.restarts import FAIL
from trserve.waiting import wait_readable

ANSWER_S: Final = 5.0


class _UnansweredError(Exception):
    """Nobody said anything of the model; says why."""


def ask_hosts(config: LaunchConfig, places: Sequence[Place]) -> list[RemoteFacts | None]:
    """What is known of each model; None for those here, and for hosts that do not say.

    Raises:
        ConfigError: there are no keys to ask with.
        ModelUnavailableError: a host refuses, or does not answer and ``--on-peer-loss`` is fail.
    """
    asked = [i for i, place in enumerate(places) if _is_asked(place)]
    facts = [_ask_openai(config, place) for place in places]
    if not asked:
        return facts
    keys = read_client_keys(config.hosts.edge_keys)
    for index in asked:
        ask = greeting.Ask(protocol=PROTOCOL_VERSION, model=index, models=len(places))
        try:
            facts[index] = _ask(places[index].remote, keys, ask)
        except _UnansweredError as error:
            if config.faults.on_peer_loss == FAIL:
                raise _unavailable(places[index], str(error)) from None
    return facts


def _ask_openai(config: LaunchConfig, place: Place) -> RemoteFacts | None:
    if not place.remote.startswith(OPENAI):
        return None
    from trserve.edge.openai_facts import ask_openai
    from trserve.edge.openai_setup import read_key

    key = read_key(config.hosts.edge_keys) if config.hosts.edge_keys else ""
    try:
        return ask_openai(place.remote.removeprefix(OPENAI), place.name, key)
    except ConnectionError as error:
        if config.faults.on_peer_loss == FAIL:
            raise _unavailable(place, str(error)) from None
        return None


def _is_asked(place: Place) -> bool:
    return bool(place.remote) and not (place.is_placeholder or place.remote.startswith(OPENAI))


def _unavailable(place: Place, reason: str) -> ModelUnavailableError:
    return ModelUnavailableError(
        f"--models {place.name}@{place.remote}: {reason}\nstart it there (--edge-listen), or start "
        "without it: --on-peer-loss wait or degrade"
    )


def _ask(address: str, keys: ClientKeys, ask: greeting.Ask) -> RemoteFacts:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    connection = Connection(context, address, keys, GREETING_BYTES)
    try:
        connection.send(greeting.encode(FrameType.ASK, ask))
        return _answer(connection, time.monotonic() + ANSWER_S)
    finally:
        connection.close()
        context.destroy(linger=0)


def _answer(connection: Connection, deadline: float) -> RemoteFacts:
    while (left := deadline - time.monotonic()) > 0:
        wait_readable(connection.fd, left)
        for frame in connection.receive():
            try:
                if frames.kind_of(frame) is FrameType.FACTS:
                    return greeting.decode(frame, RemoteFacts)
                why = greeting.decode(frame, str)
            except FrameError as error:
                why = f"it answers with what is no answer: {error}"
            why = greeting.printable(why)
            raise ModelUnavailableError(f"{connection.address} refuses this server: {why}")
        if connection.refused:
            raise ModelUnavailableError(connection.failure)
        if connection.failure:
            raise _UnansweredError(connection.failure)
    raise _UnansweredError(connection.explain_silence())
