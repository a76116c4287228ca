"""Whether two servers go together, and that it is said where they do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.edge.link.joined import side
from trserve.edge import greeting
from trserve.edge.facts import RemoteFacts
from trserve.edge.greeting import Ask, Hello, Welcome, canonical, mismatch
from trserve.edge.wire import FrameError, FrameType

OWN = side(models=["edge", "Qwen3-32B"])
FACTS = [None, RemoteFacts(max_model_len=100)]


def hello(model: int = 1, max_model_len: int = 100, **changes: Any) -> Hello:
    given = {"models": ["tiny", "Qwen/Qwen3-32B"], **changes}
    return Hello(side=side(**given), instance=b"i", model=model, max_model_len=max_model_len)


def test_two_that_go_together() -> None:
    assert mismatch(hello(), OWN, FACTS) is None


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (hello(protocol=99), "version 99"),
        (hello(models=["a", "b", "c"]), "it has the models a,b,c"),
        (hello(models=["tiny", "other"]), "its model 1 is 'other', this side's is 'Qwen3-32B'"),
        (hello(model=0), "a placeholder here"),
        (hello(model=-1), "model -1 of 2"),
        (hello(router="r2r"), "--router is r2r"),
        (hello(router_texts={"checkpoint": "x"}), "--router-config checkpoint"),
        (hello(vocabulary="w"), "its vocabulary"),
        (hello(tokenizer_size=65), "its vocabulary (65 ids)"),
        (hello(max_model_len=101), "start it with --max-model-len 100"),
    ],
)
def test_two_that_do_not(given: Hello, why: str) -> None:
    assert why in (mismatch(given, OWN, FACTS) or "")


@pytest.mark.parametrize(
    ("name", "short"),
    [("32b", "32b"), ("Qwen/Qwen3-32B", "qwen3-32b"), ("/models/llm.gguf", "llm"), ("a/b/", "b")],
)
def test_one_model_has_many_spellings(name: str, short: str) -> None:
    assert canonical(name) == short


def test_greetings_travel_and_what_is_none_is_refused() -> None:
    frame = greeting.encode(FrameType.HELLO, hello())
    assert greeting.decode(frame, Hello) == hello()
    assert greeting.protocol_of(frame) == 1
    assert greeting.protocol_of(b"\x01garbage") is None
    for wrong in (frame[:-1], frame + b"x" * 70_000, b"\x01", b"\x01\xc1"):
        with pytest.raises(FrameError):
            greeting.decode(wrong, Hello)
    with pytest.raises(FrameError):
        greeting.decode(frame, Ask)
    many = hello(models=[str(n) for n in range(65)])
    with pytest.raises(FrameError, match="too many models"):
        greeting.decode(greeting.encode(FrameType.HELLO, many), Hello)


def test_greetings_without_nccl_are_those_of_before() -> None:
    welcome = Welcome(instance=b"i", facts=RemoteFacts(max_model_len=100))
    for kind, content in ((FrameType.HELLO, hello()), (FrameType.WELCOME, welcome)):
        frame = greeting.encode(kind, content)
        said = msgspec.msgpack.decode(frame[1:])
        assert not {"nccl", "no_nccl"} & set(said)
        assert greeting.decode(frame, type(content)) == content


def test_files_are_compared_by_what_is_in_them(tmp_path: Path) -> None:
    one, other = tmp_path / "a.pt", tmp_path / "b.pt"
    one.write_bytes(b"weights")
    other.write_bytes(b"weights")
    assert greeting._content(str(one)) == greeting._content(str(other)) != "weights"
    other.write_bytes(b"others")
    assert greeting._content(str(one)) != greeting._content(str(other))
    assert greeting._content(str(tmp_path)) == "a folder"
    assert greeting._content("0.5/0.5") == "0.5/0.5"
