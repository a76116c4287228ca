"""Files with a router's tensors: read without running what may be in them, checked by shape.

A pickle may run any code when it is read. Only torch's restricted reader is used here, and a file
that needs more is refused. Knows no architecture; who takes a tensor says its name and shape.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from trserve.errors import ConfigError

_SAFE = ".safetensors"
_BEGINNINGS: Final = (b"PK\x03\x04", b"\x80")
"""Of what torch writes: a zip file, and before torch 1.6 a pickle."""
_REASON: Final = "WeightsUnpickler error:"
_FRAME: Final = re.compile(r"Weights only load failed|Check the documentation|.*\bweights_only\b")
_ADVICE: Final = " Please use "


class Checkpoint:
    """The tensors of a file, in float32 as they are taken, and what else it says.

    Attributes:
        path: for messages.
        facts: what is not a tensor: of a pickled dict its other entries, of a safetensors file
            the JSON beside it.
    """

    def __init__(
        self, path: Path, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]
    ) -> None:
        self.path = path
        self.facts = facts
        self._tensors = tensors

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    @property
    def names(self) -> Collection[str]:
        """Names of all tensors."""
        return self._tensors.keys()

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """All of them by name, as they are stored."""
        return self._tensors

    def shape(self, name: str, dimensions: int) -> tuple[int, ...]:
        """The shape of ``name``. ConfigError where it is missing or has other ``dimensions``."""
        if name not in self._tensors:
            found = ", ".join(sorted(self._tensors)[:8]) or "none"
            raise self.error(f"lacks the tensor {name}; it has: {found}")
        shape = tuple(self._tensors[name].shape)
        if len(shape) != dimensions:
            raise self.error(
                f"the tensor {name} has the shape {list(shape)}; expected {dimensions} dimensions"
            )
        return shape

    def take(self, name: str, *expected: int) -> torch.Tensor:
        """``name`` in float32. ConfigError where it is missing or its shape is not ``expected``."""
        if self.shape(name, len(expected)) != expected:
            shape = list(self._tensors[name].shape)
            raise self.error(f"the tensor {name} has the shape {shape}, expected {list(expected)}")
        return self._tensors[name].detach().to(torch.float32)

    def row(self, name: str, index: int) -> torch.Tensor:
        """Row ``index`` of the matrix ``name`` in float32. ConfigError where it has none."""
        rows, _ = self.shape(name, 2)
        if index >= rows:
            raise self.error(f"the tensor {name} has {rows} rows, and row {index} is asked for")
        return self._tensors[name][index].detach().to(torch.float32, copy=True)

    def linear(self, name: str, outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Weight [outputs, inputs] and bias [outputs] of the linear layer ``name``."""
        weight = self.take(f"{name}.weight", outputs, inputs)
        return weight, self.take(f"{name}.bias", outputs)

    def refuse_others(self, known: Collection[str], what: str) -> None:
        """ConfigError where there are tensors besides ``known``, those of a ``what``."""
        if others := sorted(set(self._tensors) - set(known)):
            raise self.error(f"has tensors that a {what} does not have: {', '.join(others[:8])}")

    def error(self, message: str) -> ConfigError:
        """An error that names the file."""
        return ConfigError(f"checkpoint {self.path}: {message}")


def find_file(path: Path, names: Sequence[str]) -> Path:
    """``path``, or the first of ``names`` in it where it is a folder. ConfigError without one."""
    if not path.is_dir():
        return path
    for name in names:
        if (path / name).is_file():
            return path / name
    raise ConfigError(f"checkpoint {path}: the folder holds none of: {', '.join(names)}")


def read_checkpoint(path: Path, *, state_dict: str | None = None) -> Checkpoint:
    """The checkpoint in the file ``path``.

    Args:
        path: ``*.safetensors``, or what ``torch.save`` wrote.
        state_dict: of a pickled dict, the entry that holds the tensors; None: the dict itself.

    Raises:
        ConfigError: it cannot be read, holds something else, or needs an unrestricted pickle.
    """
    if path.suffix == _SAFE:
        return Checkpoint(path, _read_safe(path), _read_facts(path.with_suffix(".json")))
    content = read_pickle(path)
    facts: dict[str, Any] = {}
    if state_dict is not None and isinstance(content, Mapping):
        facts = {key: value for key, value in content.items() if key != state_dict}
        content = content.get(state_dict)
    if not isinstance(content, Mapping):
        wanted = f"a dict with the entry {state_dict!r}" if state_dict else "a dict of tensors"
        raise ConfigError(f"checkpoint {path}: expected {wanted}")
    if others := [k for k, value in content.items() if not isinstance(value, torch.Tensor)]:
        raise ConfigError(f"checkpoint {path}: {others[0]!r} is not a tensor")
    return Checkpoint(path, dict(content), facts)


def read_pickle(path: Path) -> Any:
    """What ``torch.save`` wrote to ``path``: tensors, numbers, texts, lists and dicts of them.

    Raises:
        ConfigError: it cannot be read, or holds objects that only running code could make.
    """
    try:
        _refuse_other_kinds(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ConfigError(
            f"checkpoint {path}: refused, because reading it could run code that is in it "
            f"({_reason(error)}); save its tensors alone, as safetensors or a plain state dict"
        ) from None
    except (OSError, EOFError, RuntimeError, ValueError, KeyError) as error:
        reason = str(error) or "it ends too early; copy it again"
        raise ConfigError(f"checkpoint {path}: cannot be read: {reason}") from None
    # What a damaged pickle says next need not be there, nor be of the kind that it is used as.
    except (IndexError, AssertionError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"checkpoint {path}: is damaged ({error}); copy or download it again"
        ) from None


def _refuse_other_kinds(path: Path) -> None:
    # The restricted reader takes any of them for a pickle that it must not run.
    with path.open("rb") as file:
        beginning = file.read(max(map(len, _BEGINNINGS)))
    if not beginning:
        raise ConfigError(f"checkpoint {path}: the file is empty; copy or download it again")
    if not beginning.startswith(_BEGINNINGS):
        raise ConfigError(
            f"checkpoint {path}: no file that torch.save wrote; is it a git-LFS pointer or a web "
            "page that was saved in its place? Download the file itself"
        )


def _reason(error: pickle.UnpicklingError) -> str:
    """What the restricted reader met; its advice is to read the file without restriction."""
    paragraphs = re.split(r"\n\s*\n", str(error).rpartition(_REASON)[2])
    for paragraph in paragraphs:
        line = " ".join(paragraph.partition(_ADVICE)[0].split()).rstrip(".")
        if line and not _FRAME.match(line):
            return line
    return "it holds more than tensors, numbers and texts"


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``. ConfigError where it cannot be read or is something else."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"checkpoint {path}: cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"checkpoint {path}: expected a JSON object")
    return found


def _read_safe(path: Path) -> dict[str, torch.Tensor]:
    try:
        found: dict[str, torch.Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"checkpoint {path}: cannot be read: {error}") from None
    return found


def _read_facts(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}
