"""Keyword arguments of an engine are checked as flags are, before anything is started."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.procfs import descendants
from trserve import Engine
from trserve.engine_settings import engine_config, engine_environment
from trserve.errors import ConfigError

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"router_confg": {"tau": 0.5}}, "router_confg.* is no setting; did you mean router_config"),
    ({"max_modellen": 3}, "did you mean max_model_len"),
    ({"nonsense": 3}, "nonsense.* is no setting; see `trserve launch --help`"),
    ({"device": "gpu"}, "device='gpu'.*none of: .*cpu"),
    ({"dtype": "float16"}, "none of: .*bfloat16"),
    ({"quantization": "int4"}, "none of: .*int8"),
    ({"early_prefill": "never"}, "none of: "),
    ({"schedule": "x"}, "none of: "),
    ({"on_peer_loss": "degraed"}, "none of: .*degrade"),
    ({"router_config": "tau"}, "router_config='tau'"),
    ({"memory": "2x"}, "memory='2x'"),
    ({"memory": 2.5}, "must be a whole number"),
    ({"max_num_seqs": True}, "must be a whole number"),
    ({"max_num_seqs": "many"}, "no whole number"),
    ({"watchdog_s": "soon"}, "no number"),
    ({"watchdog_s": None}, "must be a number"),
    ({"enable_prefix_caching": 1}, "must be True or False"),
    ({"dtype": 16}, "must be a text"),
    ({"models": {"tiny"}}, "must be a list"),
    ({"tokenizer": 5}, "must be a text"),
    ({"executor": "ray"}, "is for `trserve launch`"),
]


@pytest.mark.parametrize(("settings", "why"), WRONG, ids=str)
def test_what_is_wrong_is_named(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Engine(**settings)


def test_texts_are_read_as_flags_are_and_values_taken_as_they_are() -> None:
    texts = engine_config(
        {"models": "tiny,small", "router_config": "tau=0.1", "memory": "2g", "threads": "1,1"}
        | {"enable_prefix_caching": "off", "watchdog_s": "20", "max_model_len": "1k"}
    )
    values = engine_config(
        {"models": ["tiny", "small"], "router_config": {"tau": 0.1}, "memory": 2 << 30}
        | {"threads": [1, 1], "enable_prefix_caching": False, "watchdog_s": 20}
        | {"max_model_len": texts.model.max_model_len}
    )
    assert texts == values
    assert texts.model.max_model_len in (1000, 1024)
    assert engine_config({"models": "tiny", "threads": 2}).placement.threads == (2,)
    assert engine_config({"gpus": [[0], [1]]}).placement.gpus == ((0,), (1,))
    assert engine_config({"record": Path("there")}).recording.record == "there"
    assert engine_config({"tokenizer": Path("a,b")}).model.tokenizer == "a,b"


def test_what_each_process_reads_for_itself_is_passed_on() -> None:
    for settings, found in (
        ({}, {}),
        ({"log_level": "debug"}, {"TRSERVE_LOG_LEVEL": "debug"}),
        ({"enforce_eager": True}, {"TRSERVE_CUDA_GRAPHS": ""}),
    ):
        assert engine_environment(engine_config(settings), settings) == found


def test_it_reaches_every_process_and_not_the_program() -> None:
    others = set(descendants(os.getpid()))
    with Engine(models="tiny", threads=1, log_level="error", enforce_eager=True):
        own = set(descendants(os.getpid())) - others
        assert len(own) == 2, "a supervisor and a worker"
        for pid in own:
            found = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            assert {b"TRSERVE_LOG_LEVEL=error", b"TRSERVE_CUDA_GRAPHS="} <= set(found)
    assert not {"TRSERVE_LOG_LEVEL", "TRSERVE_CUDA_GRAPHS"} & set(os.environ)
