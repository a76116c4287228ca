"""Reading checkpoints: safe whatever is in the file, and clear about what does not fit."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from trserve.errors import ConfigError
from trserve.router_lib.checkpoints import Checkpoint, find_file, read_checkpoint, read_pickle


class Bomb:
    """Pickled, it would make a folder when it is read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.folder),)


TENSORS = {"a.weight": torch.ones(2, 3), "a.bias": torch.ones(2, dtype=torch.bfloat16)}


def test_a_file_that_would_run_code_is_refused_and_runs_none(tmp_path: Path) -> None:
    made, file = tmp_path / "made", tmp_path / "bad.pt"
    torch.save({"state_dict": TENSORS, "extra": Bomb(made)}, file)
    with pytest.raises(ConfigError, match=r"bad.pt: refused, because reading it could run code"):
        read_pickle(file)
    assert not made.exists()


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04broken"])
@pytest.mark.parametrize("name", ["x.pt", "x.safetensors"])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes, name: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=name):
        read_checkpoint(tmp_path / name)
    with pytest.raises(ConfigError, match=r"gone\.pt"):
        read_checkpoint(tmp_path / "gone.pt")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:a\n", "is it a git-LFS pointer"),
        (b"<!DOCTYPE html>", "or a web page"),
        (b"\x12\x80\xfe" * 50, "no file that torch.save wrote"),
        (b"", "the file is empty"),
        (b"\x80\x02}", r"cannot be read: it ends too early"),
        (b"\x80\x02.", r"is damaged \(pop from empty list\)"),
        (b"\x80\x02\xff", r"\(Unsupported operand 255\)"),
    ],
)
def test_what_is_no_torch_file_gets_a_reason_and_no_advice_of_torchs(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    (tmp_path / "x.pt").write_bytes(content)
    with pytest.raises(ConfigError, match=reason) as info:
        read_pickle(tmp_path / "x.pt")
    assert "weights_only" not in str(info.value)


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        (Bomb(Path("made")), r"\(Trying to load unsupported GLOBAL posix.mkdir whose .*blocked\)"),
        (io.BytesIO, r"\(Unsupported global: GLOBAL _io.BytesIO was not .* by default\)"),
    ],
)
def test_a_refusal_says_what_was_met_alone(tmp_path: Path, extra: object, reason: str) -> None:
    torch.save({"extra": extra}, tmp_path / "x.pt")
    with pytest.raises(ConfigError, match=reason) as info:
        read_pickle(tmp_path / "x.pt")
    for advice in ("weights_only", "safe_globals", "\x1b", "\n"):
        assert advice not in str(info.value)


def test_both_kinds_of_files_hold_the_same(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "x.safetensors")
    (tmp_path / "x.json").write_text(json.dumps({"model_type": "T"}))
    torch.save({"model_type": "T", "state_dict": TENSORS}, tmp_path / "x.pt")
    for file in ("x.safetensors", "x.pt"):
        found = read_checkpoint(tmp_path / file, state_dict="state_dict")
        assert found.facts == {"model_type": "T"}
        assert set(found.names) == set(TENSORS)
        weight, bias = found.linear("a", 2, 3)
        assert weight.dtype == bias.dtype == torch.float32
        assert torch.equal(weight, torch.ones(2, 3))
    (tmp_path / "x.json").write_text("[1]")
    with pytest.raises(ConfigError, match=r"x\.json: expected a JSON object"):
        read_checkpoint(tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1], "expected a dict with the entry 'state_dict'"),
        ({"a": torch.ones(1)}, "expected a dict with the entry 'state_dict'"),
        ({"state_dict": {"a": 3}}, "'a' is not a tensor"),
    ],
)
def test_what_holds_no_tensors_is_refused(tmp_path: Path, content: object, message: str) -> None:
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(ConfigError, match=message):
        read_checkpoint(tmp_path / "x.pt", state_dict="state_dict")


def test_a_tensor_that_does_not_fit_is_named_with_both_shapes() -> None:
    checkpoint = Checkpoint(Path("f.pt"), TENSORS, {})
    with pytest.raises(ConfigError, match=r"f.pt: lacks the tensor b; it has: a.bias, a.weight"):
        checkpoint.take("b", 1)
    expected = r"f.pt: the tensor a.weight has the shape \[2, 3\], expected \[2, 4\]"
    with pytest.raises(ConfigError, match=expected):
        checkpoint.linear("a", 2, 4)
    with pytest.raises(ConfigError, match=r"a.bias has the shape \[2\]; expected 2 dimensions"):
        checkpoint.shape("a.bias", 2)
    with pytest.raises(ConfigError, match=r"has 2 rows, and row 2 is asked for"):
        checkpoint.row("a.weight", 2)
    with pytest.raises(ConfigError, match=r"tensors that a network does not have: a.bias"):
        checkpoint.refuse_others(["a.weight"], "network")


def test_a_folder_is_searched_in_order(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none of: a, b"):
        find_file(tmp_path, ("a", "b"))
    (tmp_path / "b").touch()
    assert find_file(tmp_path, ("a", "b")) == tmp_path / "b"
    assert find_file(tmp_path / "b", ("a",)) == tmp_path / "b"
