"""What the other host sees of a request's parameters."""

from __future__ import annotations

import logging

import pytest

from trserve.edge.far_params import FarParams
from trserve.ipc.layout import PARAMS_BYTES
from trserve.params import RequestParams, SamplingParams, decode_params, encode_params


def test_the_homes_values_go_along_and_a_requests_own_come_first() -> None:
    far = FarParams({"tau": 0.5, "p": 0.1})
    far.configure({"p": 0.2})
    params = RequestParams(sampling=SamplingParams(), router={"tau": 0.9})
    assert decode_params(far.blob(params)).router == {"tau": 0.9, "p": 0.2}
    assert params.router == {"tau": 0.9}


def nearly_full() -> RequestParams:
    """Parameters that fit, but with nothing more in them."""
    bias: dict[int, float] = {}
    while True:
        params = RequestParams(sampling=SamplingParams(logit_bias=dict(bias)))
        if len(encode_params(params)) > PARAMS_BYTES - 20:
            return params
        bias[len(bias)] = 0.5


def test_where_there_is_no_room_for_them_somebody_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    params, values = nearly_full(), {"a_threshold": 0.5, "another_threshold": 0.25}
    assert len(encode_params(params)) <= PARAMS_BYTES
    with caplog.at_level(logging.WARNING, "trserve.edge.far_params"):
        blob = FarParams(values).blob(params)
    assert blob == encode_params(params)
    assert "a_threshold, another_threshold" in caplog.text and "routes it by its own" in caplog.text
