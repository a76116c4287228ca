"""GGUF weights against transformers: each architecture, each type, and errors that name things."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from transformers.integrations.gguf.dequant import dequantize

from tests.models.gguf_writing import close, write_gguf
from tests.models.reference import Harness, logits_of, make_model
from trserve.errors import ModelUnavailableError
from trserve.models import gguf
from trserve.models.gguf_file import QUANTIZATIONS, GgufFile
from trserve.models.loading import load_model
from trserve.models.spec import read_spec

SCALES = {
    "Q4_0": (0, 1),
    "Q4_1": (0, 2),
    "Q5_0": (0, 1),
    "Q5_1": (0, 2),
    "Q8_0": (0, 1),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208, 1),
}
"""Where a block has its half-precision scales: first byte, and how many."""


def check_logits(model, path, tolerance=1e-4):
    harness = Harness(path)
    tokens = torch.randint(96, (100,), generator=torch.Generator().manual_seed(1)).tolist()
    table = harness.table(100)
    harness.forward([(tokens[:60], 0, table)])
    out = harness.forward([(tokens[60:], 60, table)])
    assert (out.logits[0] - logits_of(model, tokens)[-1]).abs().max() < tolerance


@pytest.mark.parametrize("case", ["qwen3", "qwen3-bias-tied", "qwen2", "llama-bias"])
def test_logits_equal_transformers(case, tmp_path):
    model = make_model(case)
    path = write_gguf(model, tmp_path / "model.gguf")
    spec = read_spec(path)
    assert spec.num_parameters == model.num_parameters()
    assert spec.eos_token_ids == (2,)
    check_logits(model, path)


def test_llama3_scaling_comes_as_divisors(tmp_path):
    model = make_model("llama3-rope")
    scaled = model.model.rotary_emb.inv_freq
    plain = 500.0 ** (-torch.arange(0, 16, 2) / 16)
    divisors = plain / scaled
    assert divisors.max() > 3
    check_logits(model, write_gguf(model, tmp_path / "m.gguf", rope_freqs=divisors))


@pytest.mark.parametrize(
    ("case", "scaling"),
    [
        ("linear-rope", {"type": "linear", "factor": 2.5}),
        ("yarn-rope", {"type": "yarn", "factor": 4.0, "original_context_length": 64}),
    ],
)
def test_other_scalings_come_as_metadata(case, scaling, tmp_path):
    model = make_model(case)
    named = {f"{{arch}}.rope.scaling.{key}": value for key, value in scaling.items()}
    check_logits(model, write_gguf(model, tmp_path / "m.gguf", **named))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [kind.name for kind in QUANTIZATIONS.values()])
def test_every_type_is_read_as_transformers_reads_it(kind, dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(gguf, "_SLAB", 5 * 512)
    raw, number = random_blocks(kind, rows=37, width=512), GGMLQuantizationType[kind]
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("blk.0.attn_q.weight", raw, raw_dtype=number)
    file = GgufFile(close(writer, tmp_path / "m.gguf"))
    tensor = gguf.read_tensor(file, "blk.0.attn_q.weight", dtype)
    assert tensor.dtype == dtype
    expected = reference_weights(raw, number).reshape(37, 512).to(dtype)
    torch.testing.assert_close(tensor, expected, rtol=1e-6, atol=1e-7)


def reference_weights(raw, number):
    """Float32, by transformers' own reader where it knows the type."""
    if number.name == "BF16":
        return torch.from_numpy(raw).view(torch.bfloat16).float()
    if number.name in ("F32", "F16"):
        return torch.from_numpy(raw).float()
    if number.name in ("Q5_0", "Q5_1"):
        return five_bits(raw, offset=number.name == "Q5_1")
    return dequantize(torch.from_numpy(raw), int(number))


def five_bits(raw, offset):
    """Block by block, as the format is described: scale, perhaps minimum, fifth bits, nibbles."""
    weights = []
    for block in raw.reshape(-1, 24 if offset else 22):
        scales, high, low = (
            block[: 4 if offset else 2].view(np.float16),
            block[-20:-16],
            block[-16:],
        )
        fifth = np.unpackbits(high, bitorder="little")
        codes = np.concatenate([low & 15, low >> 4]) + 16 * fifth
        shift = np.float32(scales[1]) if offset else np.float32(-16) * np.float32(scales[0])
        weights.append(codes * np.float32(scales[0]) + shift)
    return torch.from_numpy(np.concatenate(weights).astype(np.float32))


def random_blocks(kind, rows, width):
    """Random bytes, with scales that are no infinities."""
    rng = np.random.default_rng(7)
    if kind in ("F32", "F16"):
        return rng.standard_normal((rows, width)).astype({"F32": "f4", "F16": "f2"}[kind])
    if kind == "BF16":
        return (
            (rng.standard_normal((rows, width)).astype("f4").view("u4") >> 16)
            .astype("u2")
            .view("u1")
        )
    layout = next(q for q in QUANTIZATIONS.values() if q.name == kind)
    blocks = rng.integers(0, 256, (rows * width // layout.block, layout.nbytes), np.uint8)
    first, count = SCALES[kind]
    scales = rng.standard_normal((len(blocks), count)).astype(np.float16)
    blocks[:, first : first + 2 * count] = scales.view(np.uint8)
    return blocks.reshape(rows, -1)


def test_bfloat16_decoder(tmp_path):
    model = make_model("llama-bias")
    path = write_gguf(model, tmp_path / "m.gguf")
    harness = Harness(path, dtype=torch.bfloat16)
    out = harness.forward([([1, 2, 3], 0, harness.table(3))])
    assert (out.logits[0] - logits_of(model, [1, 2, 3])[-1]).abs().max() < 0.5


def refusal(path):
    with pytest.raises(ModelUnavailableError) as info:
        read_spec(path)
    return str(info.value)


def test_unsupported_files_are_named(tmp_path):
    model = make_model("qwen3")
    path = tmp_path / "m.gguf"
    writer = GGUFWriter(path, "gemma3")
    close(writer, path)
    assert "'gemma3'" in (said := refusal(path))
    assert "qwen3, qwen2, llama" in said
    assert "not the size of a head" in refusal(
        write_gguf(model, path, **{"{arch}.rope.dimension_count": 8})
    )
    assert "expert_count 8" in refusal(write_gguf(model, path, **{"{arch}.expert_count": 8}))
    assert "lacks 'block_count'" in refusal(write_gguf(model, path, **{"{arch}.block_count": None}))
    longrope = {"{arch}.rope.scaling.type": "longrope", "{arch}.rope.scaling.factor": 2.0}
    assert "'longrope'" in refusal(write_gguf(model, path, **longrope))
    assert "one of 3 parts" in refusal(write_gguf(model, path, **{"split.count": 3}))


def test_unsupported_types_are_named(tmp_path):
    path = tmp_path / "m.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_tensor(
        "blk.0.ffn_up.weight", np.zeros((4, 84), np.uint8), raw_dtype=GGMLQuantizationType.Q2_K
    )
    close(writer, path)
    assert "stores blk.0.ffn_up.weight as Q2_K" in refusal(path)


def test_without_the_package_a_quantized_file_says_what_to_install(tmp_path, monkeypatch):
    path = tmp_path / "m.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_tensor(
        "blk.0.ffn_up.weight", np.zeros((4, 34), np.uint8), raw_dtype=GGMLQuantizationType.Q8_0
    )
    close(writer, path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install trserve[gguf]" in refusal(path)


def test_damaged_files(tmp_path):
    path = write_gguf(make_model("qwen3"), tmp_path / "m.gguf")
    content = path.read_bytes()
    for damaged, said in (
        (b"", "not a readable GGUF"),
        (b"GGML" + content[4:], "letters GGUF"),
        (content[:4] + b"\x09\0\0\0" + content[8:], "version 9"),
        (content[:200], "ends within its header"),
    ):
        path.write_bytes(damaged)
        assert said in refusal(path)
    path.write_bytes(content[:-100])
    with pytest.raises(ModelUnavailableError, match="ends within the tensor"):
        load_model(path, read_spec(path), dtype=torch.float32)


def test_missing_and_misshapen_tensors_are_named(tmp_path):
    model = make_model("qwen3")
    path = write_gguf(model, tmp_path / "m.gguf", leave_out="blk.1.ffn_up.weight")
    with pytest.raises(ModelUnavailableError, match=r"lacks the tensor blk\.1\.ffn_up\.weight"):
        load_model(path, read_spec(path), dtype=torch.float32)
    path = write_gguf(model, tmp_path / "m.gguf", **{"{arch}.feed_forward_length": 79})
    with pytest.raises(ModelUnavailableError, match=r"ffn_gate.*\[80, 48\].*\[79, 48\]"):
        load_model(path, read_spec(path), dtype=torch.float32)
