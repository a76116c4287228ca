"""The documents' example of the Python API runs as it stands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/python.md"


def test_the_example_runs(tmp_path: Path) -> None:
    (code,) = (block.split("```")[0] for block in PAGE.read_text().split("```python\n")[1:])
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("125 - 54 = 71. 71 + 25 = 96. The answer is 96.")
    assert len(list((tmp_path / "records").glob("*.rows"))) == 2
