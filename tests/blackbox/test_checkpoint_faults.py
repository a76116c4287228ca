"""Reported faults that depend on what a checkpoint says: ends of a turn, a strict template."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serverproc import Server
from trserve.demo import PAIR_DIR

CHAT = "/v1/chat/completions"
QUESTION = {"role": "user", "content": "What is 2 + 3?"}
REFUSAL = "System role not supported"
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('" + REFUSAL + "') }}"
    "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The embedded pair, in which a full stop ends a turn too."""
    folder = tmp_path_factory.mktemp("pair")
    shutil.copytree(PAIR_DIR, folder, dirs_exist_ok=True)
    vocabulary = json.loads((folder / "tiny" / "tokenizer.json").read_text())["model"]["vocab"]
    for name in ("tiny", "small"):
        path = folder / name / "generation_config.json"
        settings = json.loads(path.read_text())
        settings["eos_token_id"] = [*settings["eos_token_id"], vocabulary["."]]
        path.write_text(json.dumps(settings))
    models = f"{folder / 'tiny'},{folder / 'small'}"
    arguments = ["--device", "cpu", "--models", models, "--chat-template", TEMPLATE]
    with Server([*arguments, "--router", "r-stitch", "--router-config", "tau=0.06"]) as running:
        yield running


def chat(server: Server, **fields: Any) -> dict[str, Any]:
    body = {"messages": [QUESTION], "temperature": 0, "max_tokens": 40, **fields}
    choice: dict[str, Any] = server.post(CHAT, body)["choices"][0]
    return choice


def test_p30_every_end_of_a_list_ends_a_turn(server: Server) -> None:
    on = chat(server, ignore_eos=True)["message"]["content"]
    assert "." in on and on.index(".") < len(on) - 1
    for fields in ({}, {"trserve": {"only": "small"}}, {"trserve": {"router": {"tau": 0.0}}}):
        choice = chat(server, **fields)
        assert choice["finish_reason"] == "stop"
        assert choice["message"]["content"] == on[: on.index(".")]


def test_p36_what_a_template_refuses_is_a_refused_request(server: Server) -> None:
    messages = [{"role": "system", "content": "Be brief."}, QUESTION]
    for fields in ({}, {"stream": True}):
        answer = server.request("POST", CHAT, {"messages": messages, **fields})
        assert answer.status == 400
        error = answer.json()["error"]
        assert REFUSAL in error["message"]
        assert error["param"] == "messages"
    assert chat(server)["message"]["content"]
