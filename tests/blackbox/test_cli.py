"""The command line: fast help, exit codes, and one clear message for each mistake."""

from __future__ import annotations

import socket
import statistics
import subprocess
import sys
import time
from random import Random

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.golden.random_pair import VOCAB_SIZE, byte_tokenizer, write_checkpoint
from tests.machine_speed import slowness
from tests.serverproc import run_command

HELP_LIMIT_S = 0.3


def lines_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]


def refused(args: list[str], code: int) -> str:
    """Runs ``launch`` with a mistake in it; returns standard error."""
    done = run_command(["launch", "--port", "0", *args])
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    return done.stderr


def help_seconds() -> float:
    start = time.perf_counter()
    run = subprocess.run([sys.executable, "-m", "trserve", "--help"], capture_output=True)
    assert run.returncode == 0
    return time.perf_counter() - start


def test_help_is_fast():
    """Median of 7, warm; a neighbour on the machine may spoil some rounds, not all."""
    medians = []
    for _ in range(8):
        medians.append(statistics.median(help_seconds() for _ in range(7)))
        limit_s = HELP_LIMIT_S * slowness()
        if medians[-1] < limit_s:
            break
    assert medians[-1] < limit_s, medians


@pytest.mark.parametrize("args", [["--help"], ["launch", "--help"]], ids=" ".join)
def test_help_imports_nothing_heavy(args):
    timed = [sys.executable, "-X", "importtime", "-m", "trserve", *args]
    run = subprocess.run(timed, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0
    imported = {line.rpartition("|")[2].strip() for line in run.stderr.splitlines()}
    assert "trserve" in imported, "the import log was not read"
    assert not imported & {"torch", "transformers", "numpy", "scipy", "tokenizers"}


def test_help_names_the_commands_and_flags():
    assert "launch" in run_command(["--help"]).stdout
    text = run_command(["launch", "--help"]).stdout
    for flag in ("--models", "--router", "--router-config", "--device", "--port", "--dtype"):
        assert flag in text


def test_unknown_flag():
    assert "--no-such-flag" in refused(["--no-such-flag"], 2)


def test_unknown_router():
    error = refused(["--router", "no-such-router"], 2)
    assert "no-such-router" in error
    assert "r-stitch" in error, "the message offers the routers that exist"


def test_unknown_router_key():
    error = refused(["--router", "r-stitch", "--router-config", "no_such_key=1"], 2)
    assert "no_such_key" in error
    assert "tau" in error, "the message offers the keys that exist"


def test_router_value_of_the_wrong_type():
    error = refused(["--router", "r-stitch", "--router-config", "tau=warm"], 2)
    assert "tau" in error
    assert "warm" in error


def test_unknown_model():
    assert "no-such-model" in refused(["--models", "no-such-model,small"], 3)


def test_missing_weights():
    """Two lines: what is missing, and what to do."""
    error = refused(["--models", "0.6b,32b"], 3)
    assert len(lines_of(error)) == 2, error
    assert "0.6b" in error


def test_port_in_use():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = run_command(["launch", "--host", "127.0.0.1", "--port", port])
    assert done.returncode == 4
    assert done.stdout == ""
    (line,) = lines_of(done.stderr)
    assert port in line


def test_models_with_different_tokenizers(tmp_path):
    """The ids of the bytes are in another order: same size, same specials, other meaning."""
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=VOCAB_SIZE, **shape, **heads))
    write_checkpoint(model, tmp_path / "first", [258])
    other = byte_tokenizer(Random("another order"))
    write_checkpoint(model, tmp_path / "second", [258], other)
    error = refused(["--models", f"{tmp_path / 'first'},{tmp_path / 'second'}"], 2)
    assert "tokenizer" in error
    assert "first" in error
    assert "second" in error
