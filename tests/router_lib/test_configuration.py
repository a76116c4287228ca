"""From ``--router-config`` to values: numbers, texts, weights, defaults, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trserve.errors import ConfigError
from trserve.router_lib.base import BaseRouter, RouterContext
from trserve.router_lib.configuration import read_untyped, read_values
from trserve.router_lib.none import NoRouter
from trserve.router_lib.parameters import (
    Parameter,
    TextParameter,
    WeightsParameter,
    split_weights,
)
from trserve.router_lib.registry import BUILTIN
from trserve.workers.routing import Routing, create_router

PARAMETERS = (
    Parameter("eta", "a bound", default=0.5, minimum=0.0, maximum=1.0),
    TextParameter("checkpoint", "the file of the network", is_path=True),
    TextParameter("tap", "which state", default="final", choices=("final", "other")),
    TextParameter("model", "where the first model lies", is_path=True),
    WeightsParameter("weights", "one a model", default=""),
)


def read(*pairs: tuple[str, str], models: int = 2, found: str = "/a/model") -> dict[str, Any]:
    places = {"model": found, "tokenizer": "/never/asked/for"}
    return dict(read_values(pairs, "mine", PARAMETERS, found=places, models=models))


def test_values_are_typed_and_completed(tmp_path: Path) -> None:
    assert read(("checkpoint", str(tmp_path))) == {
        "eta": 0.5,
        "checkpoint": str(tmp_path),
        "tap": "final",
        "model": "/a/model",
        "weights": "",
    }
    given = read(
        ("checkpoint", str(tmp_path)), ("eta", "0.25"), ("model", str(tmp_path)), ("eta", "1")
    )
    assert (given["eta"], given["model"]) == (1.0, str(tmp_path))


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([], "mine needs --router-config checkpoint=.*the file of the network"),
        ([("checkpoint", "/not/there.pt")], "checkpoint = /not/there.pt: there is no such file"),
        ([("checkpoint", "/"), ("eta", "much")], "eta=much: not a number"),
        ([("checkpoint", "/"), ("eta", "nan")], "eta must be a finite number"),
        ([("checkpoint", "/"), ("eta", "1.5")], "eta = 1.5 is outside 0 to 1"),
        ([("checkpoint", "/"), ("tap", "first")], "tap = first is not one of: final, other"),
        ([("checkpoint", "/"), ("tau", "1")], "no parameter 'tau'; it has: eta, checkpoint"),
        ([("checkpoint", "/"), ("weights", "1/x")], "weights = 1/x: not numbers separated by /"),
        ([("checkpoint", "/"), ("weights", "1/-1")], "a weight is finite and not negative"),
        ([("checkpoint", "/"), ("weights", "1/inf")], "a weight is finite and not negative"),
        ([("checkpoint", "/"), ("weights", "0/0")], "no weight is above 0"),
        ([("checkpoint", "/"), ("weights", "1/1/1")], "3 weights, but --models names 2 models"),
    ],
)
def test_what_is_wrong_is_named(pairs: list[tuple[str, str]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(*pairs)


def test_a_number_is_no_text() -> None:
    assert "must be a text" in str(PARAMETERS[1].problem(3.0))


def test_weights_are_split() -> None:
    assert split_weights("0.5/0.3/0.2") == (0.5, 0.3, 0.2)
    assert split_weights("") == ()
    assert read(("checkpoint", "/"), ("weights", "1/2/3"), models=3)["weights"] == "1/2/3"


def test_of_a_router_from_outside_what_looks_like_a_number_is_one() -> None:
    pairs = (("a", "3"), ("b", "1e-3"), ("c", "3/4"), ("d", "file.pt"))
    assert read_untyped(pairs) == {"a": 3.0, "b": 0.001, "c": "3/4", "d": "file.pt"}


class Outside(NoRouter):
    """A router from outside the package: nobody but its worker knows its parameters."""

    parameters = PARAMETERS[:3]


def test_a_worker_completes_the_texts_of_a_router_from_outside() -> None:
    def made(**config: object) -> BaseRouter:
        return create_router(f"{__name__}:Outside", RouterContext(0, ("a", "b"), 8, config))

    router = made(checkpoint="/", eta=0.25)
    assert router.context.config == {"checkpoint": "/", "eta": 0.25, "tap": "final"}
    assert [each["name"] for each in Routing(router).describe()] == ["eta"]
    for config, message in (
        ({}, "needs --router-config checkpoint"),
        ({"checkpoint": 5.0}, "checkpoint must be a text"),
        ({"checkpoint": "/", "tap": "first"}, "tap = first is not one of"),
        ({"checkpoint": "/", "eta": "much"}, "eta must be a finite number"),
    ):
        with pytest.raises(ConfigError, match=message):
            made(**config)


def test_only_numbers_can_be_set_by_a_request() -> None:
    for name, entry in BUILTIN.items():
        for parameter in entry.parameters:
            if isinstance(parameter, TextParameter):
                assert not parameter.per_request, (name, parameter.name)
