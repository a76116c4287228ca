"""What a checkpoint suggests for requests that name no sampling parameters."""

import json
from pathlib import Path

import pytest

from trserve.demo import model_path
from trserve.models.generation_defaults import read_sampling_defaults
from trserve.params import SamplingDefaults


def test_without_the_file_nothing_is_suggested(tmp_path: Path) -> None:
    assert read_sampling_defaults(tmp_path) == SamplingDefaults()


@pytest.mark.parametrize(
    ("suggested", "expected"),
    [
        ({"temperature": 0.6, "top_p": 0.95, "top_k": 20}, (0.6, 0.95, 20)),
        ({"do_sample": True, "temperature": 0.6}, (0.6, 1.0, 0)),
        ({"do_sample": False, "temperature": 0.6}, (0.0, 1.0, 0)),
        ({"temperature": "hot", "top_p": 7, "top_k": -1}, (1.0, 1.0, 0)),
        ({"temperature": None, "top_k": True}, (1.0, 1.0, 0)),
    ],
)
def test_what_is_in_range_counts(
    tmp_path: Path, suggested: dict[str, object], expected: tuple[float, float, int]
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(suggested))
    found = read_sampling_defaults(tmp_path)
    assert (found.temperature, found.top_p, found.top_k) == expected


def test_the_embedded_pair_is_greedy() -> None:
    assert read_sampling_defaults(model_path("tiny")).temperature == 0.0
