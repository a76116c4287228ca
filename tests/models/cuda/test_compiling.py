"""Every kernel compiled for the devices that count, without one."""

import importlib.util
import inspect

import pytest
import torch

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="triton is not installed: GPU kernels neither interpreted nor compiled",
)

SHARED_MEMORY = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""Bytes that one program may take, by target (CUDA programming guide, compute capabilities)."""

BF16, F32, F64, I32, I64 = "*bf16", "*fp32", "*fp64", "*i32", "*i64"
NORM = {"x": BF16, "residual": BF16, "weight": BF16, "out": BF16, "eps": "fp32"}
ROWS = {
    "logits": F32,
    "stride": "i32",
    "size": "i32",
    "largest": F32,
    "temperatures": F64,
    "lowest": F64,
    "finite": I32,
    "number": "i32",
}
SAMPLING = {**ROWS, "weights": F64, "sums": F64, "numbers": F64, "best": I32, "wanted": F64}
SELECTING = {"before": F64, "after": F64, "states_before": F64, "states_after": F64}
PARTS = {"PARTS": 38, "PADDED": 64, "BLOCK": 4096}
LENGTHS = dict.fromkeys(("query_start", "kv_len", "block_start", "blocks"), I32)
ATTENTION = {**LENGTHS, "scale": "fp32", "tiles": "i32", "block_stride": "i64"}
ATTENTION |= {"partial": F32, "stats": F32}
GEOMETRY = {"KV_HEADS": 8, "BLOCK_SIZE": 16}


def attention(dtype, group, dim, tile, splits):
    """A case of the attention kernel as ``kernels_attention.attend`` launches it."""
    exact = dtype == F32
    return (
        {**ATTENTION, "q": dtype, "kv": dtype, "out": dtype},
        {**GEOMETRY, "GROUP": group, "DIM": dim, "DIM_PADDED": dim, "TILE": tile, "SPLITS": splits}
        | {"KEYS": 32 if exact else 64, "PRECISION": "ieee" if exact else "tf32"},
        {"num_warps": 4, "num_stages": 1 if exact else 2},
    )


CASES = {
    "kernels.rms_norm_kernel": [(NORM, {"SIZE": 5120, "BLOCK": 8192}, {"num_warps": 16})],
    "kernels.silu_mul_kernel": [
        ({"gate_up": BF16, "out": BF16}, {"SIZE": 3072, "BLOCK": 1024}, {})
    ],
    "kernels.take_ids_kernel": [({"ids": I64, "sources": I64, "count": "i32"}, {"BLOCK": 128}, {})],
    "kernels.rope_and_store_kernel": [
        (
            {"qkv": BF16, "positions": I64, "slots": I64, "rotations": F32, "kv": BF16, "q": BF16}
            | {"q_norm": BF16, "k_norm": BF16, "eps": "fp32", "block_stride": "i64"},
            {**GEOMETRY, "GROUP": 7, "DIM": 128, "NORMED": normed}
            | {"HEADS_PADDED": 16, "HALF_PADDED": 64},
            {},
        )
        for normed in (True, False)
    ],
    "kernels_logits.part_of_epilogue_kernel": [
        ({**ROWS, "found": F32}, {"PARTS": 38, "BLOCK": 4096}, {"num_warps": 8})
    ],
    "kernels_logits.epilogue_kernel": [
        (
            dict.fromkeys(("logsumexp", "entropy", "top_probability", "margin"), F32)
            | {"found": F32, "tokens": I32, "finite": I32, "largest_out": F32},
            {"PARTS": 38, "PADDED": 64},
            {"num_warps": 1},
        )
    ],
    "kernels_logits.uniform_kernel": [
        (
            {"seeds": I64, "positions": I64, "out": F64, "rows": "i32"},
            {"MODEL": 1, "PURPOSE": 0, "BLOCK": 128},
            {},
        )
    ],
    "kernels_filters.select_kernel": [
        ({**SAMPLING, **SELECTING}, {**PARTS, "PASS": number, "BY_WEIGHT": by_weight}, {})
        for number, by_weight in ((0, True), (1, False), (1, True), (2, True))
    ],
    "kernels_filters.threshold_kernel": [
        ({**SAMPLING, "histogram": F64, "states": F64, "out": F64}, {**PARTS, "BY_WEIGHT": by}, {})
        for by in (True, False)
    ],
    "kernels_sampling.part_sums_kernel": [(SAMPLING, {**PARTS, "FILTERED": True}, {})],
    "kernels_sampling.draw_kernel": [
        ({**SAMPLING, "out": I64}, {**PARTS, "FILTERED": by}, {}) for by in (True, False)
    ],
    "kernels_attention.attention_kernel": [
        attention(BF16, group=4, dim=128, tile=16, splits=8),
        attention(BF16, group=7, dim=64, tile=64, splits=1),
        attention(BF16, group=8, dim=128, tile=64, splits=1),
        attention(F32, group=3, dim=32, tile=16, splits=2),
        attention(F32, group=8, dim=128, tile=16, splits=1),
    ],
    "kernels_attention.merge_kernel": [
        (
            {"partial": F32, "stats": F32, "out": BF16},
            {"SPLITS": 32, "DIM": 128, "DIM_PADDED": 128},
            {},
        )
    ],
}


def kernels():
    """Every kernel of the modules, by module and name."""
    import triton

    from trserve.models.cuda import (
        kernels,
        kernels_attention,
        kernels_filters,
        kernels_logits,
        kernels_sampling,
    )

    modules = (kernels, kernels_attention, kernels_filters, kernels_logits, kernels_sampling)
    return {
        f"{module.__name__.rpartition('.')[2]}.{name}": kernel
        for module in modules
        for name, kernel in inspect.getmembers(module)
        if name.endswith("_kernel") and isinstance(kernel, triton.runtime.JITFunction)
    }


def test_no_kernel_is_left_out():
    assert set(kernels()) == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_a_kernel_compiles_for_every_target(name, full, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    cases = CASES[name] if full else CASES[name][:1]
    for types, constants, options in cases:
        for target in SHARED_MEMORY:
            compiled = compiled_for(target, kernels()[name], types, constants, options)
            assert compiled.metadata.shared <= SHARED_MEMORY[target]
            assert compiled.asm["cubin"][:4] == b"\x7fELF"


def test_passes_of_a_selection_share_what_is_compiled(monkeypatch):
    """Each set of constants is compiled on its own, and for every vocabulary."""
    from trserve.models.cuda import kernels_filters
    from trserve.models.cuda.ops_rows import Filters

    seen = []

    class Launches:
        def __init__(self, constants):
            self.constants = constants

        def __getitem__(self, grid):
            return lambda *arguments, **_: seen.append(arguments[-self.constants :])

    monkeypatch.setattr(kernels_filters, "select_kernel", Launches(5))
    monkeypatch.setattr(kernels_filters, "threshold_kernel", Launches(3))
    values = torch.ones(2, dtype=torch.float64)
    rows = kernels_filters.Rows.of(torch.zeros(2, 9000), 9000, torch.zeros(2), values)
    kernels_filters.thresholds(rows, Filters(torch.ones(2, dtype=torch.int64), values, values))
    assert len(seen) == 2 * (8 + 1)
    assert len(set(seen)) == 2 * (3 + 1)


def test_ids_that_others_write_are_read_from_no_cache(tmp_path, monkeypatch):
    """Triton takes ``cache_modifier=".cv"`` and drops it; what it does with ``volatile`` counts."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    name = "kernels.take_ids_kernel"
    compiled = compiled_for(90, kernels()[name], *CASES[name][0])
    assert compiled.asm["ptx"].count("ld.volatile.global.b32") == 1


def compiled_for(target, kernel, types, constants, options):
    """``kernel`` compiled by the bundled assembler for compute capability ``target``."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    used = {name: value for name, value in constants.items() if name in names}
    signature = {name: "constexpr" if name in used else types[name] for name in names}
    # Tensors and their strides are aligned, as they are at a launch.
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if signature[name].startswith("*") or name.endswith("stride")
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=used, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
