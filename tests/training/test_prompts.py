"""Files of prompts, and what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from trserve.errors import ConfigError
from trserve.training.prompts import TrainingPrompt, read_prompts


def test_a_text_file_has_a_message_a_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("How many?\n\n Why?\n")
    contents = [prompt.content for prompt in read_prompts(file)]
    assert contents == [
        [{"role": "user", "content": "How many?"}],
        [{"role": "user", "content": " Why?"}],
    ]


def test_json_lines_have_texts_or_chats_and_answers(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        '{"prompt": "1 + 1 =", "answer": "2"}\n'
        '{"messages": [{"role": "user", "content": "Hi"}], "id": 7}\n'
    )
    assert read_prompts(file) == [
        TrainingPrompt("1 + 1 =", "2"),
        TrainingPrompt([{"role": "user", "content": "Hi"}]),
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no prompts"),
        ('{"prompt": "a"}\n{"prompt": 3}', "line 2"),
        ('{"prompt": "a"', "line 1"),
        ('{"question": "a"}', 'line 1: needs either "messages" or "prompt"'),
        ('{"prompt": "a", "messages": []}', "needs either"),
        ('{"prompt": "a"}\n{"prompt": ""}', "line 2: is empty"),
        ('{"messages": []}', "line 1: is empty"),
    ],
)
def test_the_message_says_where(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    with pytest.raises(ConfigError, match=f"prompts.jsonl.*{message}"):
        read_prompts(file)
