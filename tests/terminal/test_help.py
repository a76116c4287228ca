"""Help by topic and purpose, `config show`, and completion."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from trserve.cli import PURPOSES, main
from trserve.config import GROUPS, config_from_flags
from trserve.config_sources import SETTINGS, gather
from trserve.launch_options import TOPICS

ROOT = Path(__file__).parents[2]
VISIBLE = {name for name, command in main.commands.items() if not command.hidden}


def run(*args: str) -> str:
    done = CliRunner().invoke(main, list(args))
    assert done.exit_code == 0, done.output
    return done.stdout


def test_every_command_has_a_purpose():
    listed = [command.name for commands in PURPOSES.values() for command in commands]
    assert sorted(listed) == sorted(VISIBLE)
    text = run("--help")
    for purpose in PURPOSES:
        assert f"{purpose}:" in text
    for name in VISIBLE:
        assert re.search(rf"^  {name}  +\S", text, re.MULTILINE)


@pytest.mark.parametrize(
    "args", [["doctor", "--port", "0"], ["config", "show"], ["chat", "--help"], ["top", "--help"]]
)
def test_nothing_heavy_is_imported(args):
    code = f"""
import sys
from trserve.cli import main
try:
    main({args!r})
finally:
    print(sorted({{"torch", "transformers"}} & set(sys.modules)), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr.splitlines()[-1] == "[]"


@pytest.mark.parametrize("command", ["launch", "doctor", "config show"])
def test_flags_stand_below_their_topics(command):
    text = run(*command.split(), "--help")
    assert set(TOPICS) == set(GROUPS)
    sections = re.split(r"^(\S[^\n]*):$", text, flags=re.MULTILINE)
    by_title = dict(zip(sections[1::2], sections[2::2], strict=True))
    for title, flag in {
        "Models": "--models",
        "Router": "--router-config",
        "Placement": "--device",
        "Engine": "--max-num-seqs",
        "Scheduling": "--batch-threshold",
        "Endpoint": "--port",
        "Faults and the end": "--drain-timeout",
        "Settings from elsewhere": "--config",
    }.items():
        assert flag in by_title[title]
    assert "--help" in text


SAID = {
    "models": ("small", "tiny"),
    "router": "module_of:Mine",
    "router_config": (("tau", "0.3"), ("weights", "0.5/0.5")),
    "threads": (1, 2),
    "memory": 2**30,
    "enable_prefix_caching": False,
    "allowed_origins": (),
    "chat_template": "{{ 'a' }}\n# \"b\"\t",
    "early_prefill": "off",
    "max_wait_ms": 2.5,
    "token_buckets_s": (1e-05, 0.1, 2.0),
    "record": "/a path/with: spaces # and more",
}


@pytest.mark.parametrize("values", [{}, SAID], ids=["defaults", "said"])
def test_what_is_shown_is_a_file_that_says_the_same(tmp_path, monkeypatch, values):
    values = dict(sorted(values.items(), key=lambda each: list(SETTINGS).index(each[0])))
    monkeypatch.setattr("trserve.config_show.settings_of", lambda given: gather(values, None, {}))
    for origin in ([], ["--origin"]):
        file = tmp_path / "shown.yaml"
        file.write_text(run("config", "show", *origin))
        assert gather({}, file, {}).config() == config_from_flags(values)


def test_origins_are_shown_and_keys_are_not(tmp_path, monkeypatch):
    monkeypatch.setenv("TRSERVE_MAX_QUEUE", "5")
    monkeypatch.setenv("TRSERVE_ADMIN_KEY", "sk-secret-too")
    monkeypatch.setenv("TRSERVE_PORT", "tcp://10.0.0.1:8000")
    file = tmp_path / "server.yaml"
    file.write_text("host: 0.0.0.0")
    given = ["--config", str(file), "--api-key", "sk-secret", "--max-requests", "3"]
    lines = run("config", "show", "--origin", *given).splitlines()
    assert f"host: 0.0.0.0  # file {file}" in lines
    assert "max-queue: 5  # environment TRSERVE_MAX_QUEUE" in lines
    assert "max-requests: 3  # flag --max-requests" in lines
    assert "port: 8000  # default" in lines
    assert 'api-key: ""  # <hidden>  # flag --api-key' in lines
    assert 'admin-key: ""  # <hidden>  # environment TRSERVE_ADMIN_KEY' in lines
    assert "secret" not in "\n".join(lines)


def test_an_unknown_key_is_refused(tmp_path):
    file = tmp_path / "server.yaml"
    file.write_text("max-num-seq: 3")
    done = CliRunner().invoke(main, ["config", "show", "--config", str(file)])
    assert done.exit_code == 2
    assert "did you mean max_num_seqs" in done.output


@pytest.mark.parametrize(("shell", "sign"), [("zsh", "#compdef trserve"), ("fish", "complete ")])
def test_completion_of_other_shells(shell, sign):
    text = run("completion", shell)
    assert sign in text
    if shutil.which(shell):
        checked = subprocess.run([shell, "-n"], input=text, text=True, timeout=30)
        assert checked.returncode == 0


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("trserve laun", "launch"),
        ("trserve config sh", "show"),
        ("trserve launch --batch-th", "--batch-threshold"),
        ("trserve launch --device emu", "emulated"),
    ],
)
def test_bash_completes(tmp_path, words, expected):
    program = tmp_path / "trserve"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m trserve "$@"\n')
    program.chmod(0o755)
    script = (
        f'eval "$(trserve completion bash)"; COMP_WORDS=({words}); '
        f'COMP_CWORD={words.count(" ")}; _trserve_completion trserve; echo "${{COMPREPLY[@]}}"'
    )
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, env=env, cwd=ROOT, timeout=30
    )
    assert expected in done.stdout.split(), done.stderr
