"""Simon Willison's ``llm`` command, with the endpoint as one of its extra OpenAI models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

QUESTION = "What is 125 - 54 + 25?"


@pytest.fixture(scope="module")
def home(base_url, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("llm")
    models = [
        {"model_id": "routed", "model_name": "trserve", "api_base": base_url},
        {
            "model_id": "routed-completion",
            "model_name": "trserve",
            "api_base": base_url,
            "completion": True,
        },
    ]
    # JSON is YAML.
    (path / "extra-openai-models.yaml").write_text(json.dumps(models))
    return path


def llm(home: Path, *arguments: str) -> str:
    env = {**os.environ, "LLM_USER_PATH": str(home), "OPENAI_API_KEY": "any"}
    done = subprocess.run(
        [sys.executable, "-m", "llm", *arguments],
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_streamed_and_whole_say_the_same(home):
    asked = ["-m", "routed", "-o", "temperature", "0", "-o", "max_tokens", "40", QUESTION]
    streamed = llm(home, "prompt", *asked)
    assert streamed.strip()
    assert llm(home, "prompt", "--no-stream", *asked) == streamed


def test_usage_and_logs(home):
    llm(home, "prompt", "-m", "routed", "-o", "temperature", "0", "-s", "Be brief.", QUESTION)
    (entry,) = json.loads(llm(home, "logs", "list", "-n", "1", "--json"))
    assert entry["model"] == "routed"
    assert entry["response"].strip()
    assert entry["input_tokens"] > 5 and entry["output_tokens"] > 0


def test_completions(home):
    asked = ["-m", "routed-completion", "-o", "temperature", "0", "-o", "max_tokens", "12"]
    assert llm(home, "prompt", *asked, "Two and two").strip()
