"""A decoder in shares computes what the whole one computes, whatever its architecture."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models.reference import CASES, Harness, make_model, save
from tests.workers.tp.harness import model_plan, tp_harness
from trserve.errors import ModelUnavailableError
from trserve.models.assembly import expected_tensors
from trserve.models.loading import tensors_of
from trserve.models.sharding import Shard
from trserve.models.spec import read_spec
from trserve.workers.tp.joining import load_share

TOLERANCE = 1e-4
DIVISIBLE = {
    "qwen3": 2,
    "qwen2": 4,
    "llama-bias": 2,
    "linear-rope": 2,
    "yarn-rope-options": 2,
    "experts": 2,
    "experts-in-some-layers": 2,
}


@pytest.fixture(scope="module", autouse=True)
def by_torch_alone():
    """The kernels' small differences are no subject here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRSERVE_CPU_KERNELS", "none")
        yield


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return {
        case: save(make_model(case), tmp_path_factory.mktemp(case))
        for case in [*DIVISIBLE, "qwen3-bias-tied", "zero-layer"]
    }


def mixed_steps(rng):
    """Prompts of several lengths, suffixes, chunks and decodes in the same steps."""
    sequences = [rng.integers(96, size=n).tolist() for n in (40, 19, 1, 33)]
    starts = [0] * len(sequences)
    while any(start < len(s) for start, s in zip(starts, sequences, strict=True)):
        rows = []
        for row, tokens in enumerate(sequences):
            if starts[row] < len(tokens):
                size = min(int(rng.choice([1, 1, 3, 17, 30])), len(tokens) - starts[row])
                rows.append((row, tokens[starts[row] : starts[row] + size], starts[row]))
                starts[row] += size
        yield rows


def run(harness, seed):
    """The outputs of all steps, the same for each harness of the same seed."""
    tables = [harness.table(n) for n in (40, 19, 1, 33)]
    for index, rows in enumerate(mixed_steps(np.random.default_rng(seed))):
        also = np.array([0], np.int64) if index % 3 == 0 else None
        step = [(tokens, start, tables[row]) for row, tokens, start in rows]
        yield harness.forward(step, also)


@pytest.mark.parametrize("case", DIVISIBLE)
def test_shares_together_are_the_whole(checkpoints, case):
    path, most, steps = checkpoints[case], 0.0, 0
    with tp_harness(path, DIVISIBLE[case]) as shared:
        pairs = zip(run(Harness(path), 5), run(shared, 5), strict=True)
        for expected, found in pairs:
            steps += 1
            for name in ("logits", "hidden", "also"):
                one, other = getattr(expected, name), getattr(found, name)
                assert (one is None) == (other is None)
                if one is not None:
                    most = max(most, float((one - other).abs().max()))
    assert steps > 3
    assert 0 < most < TOLERANCE, "equal to the last bit would mean that nothing was divided"


@pytest.mark.parametrize("case", ["qwen2", "experts"])
def test_ranks_agree_to_the_last_bit(checkpoints, case):
    size = DIVISIBLE[case]
    with tp_harness(checkpoints[case], size) as shared:
        for output in run(shared, 6):
            shared.until_all_are_done()
            own = output.hidden if output.also is None else torch.cat((output.hidden, output.also))
            for rank in range(1, size):
                assert shared.hidden[rank].tobytes() == own.numpy().tobytes()


def test_what_the_last_mlp_reads_is_whole_on_rank_0(checkpoints):
    whole = Harness(checkpoints["qwen3"])
    with tp_harness(checkpoints["qwen3"], 2) as shared:
        for harness in (whole, shared):
            harness.runner.keep_tap()
        for expected, found in zip(run(whole, 7), run(shared, 7), strict=True):
            assert (expected.tap - found.tap).abs().max() < TOLERANCE


@pytest.mark.parametrize("case", ["llama-bias", "experts"])
def test_8_bit_shares_have_the_scales_of_the_whole(checkpoints, case):
    """Scales of their own would be other weights, and move the logits by what rounding moves."""
    path = checkpoints[case]
    with tp_harness(path, 2, int8=True) as shared:
        whole = Harness(path, int8=True)
        exact = Harness(path)
        for a, b, c in zip(run(whole, 8), run(shared, 8), run(exact, 8), strict=True):
            assert (a.logits - b.logits).abs().max() < TOLERANCE
            assert (a.logits - c.logits).abs().max() > 100 * TOLERANCE


def test_bfloat16_shares_differ_by_roundings_alone(checkpoints):
    """No more from one process in bfloat16 than that is from float32."""
    path = checkpoints["qwen3"]
    options = {"dtype": torch.bfloat16}
    with tp_harness(path, 2, **options) as shared:
        harnesses = (Harness(path), Harness(path, **options), shared)
        trios = zip(*(run(harness, 9) for harness in harnesses), strict=True)
        for exact, whole, found in trios:
            rounding = (exact.logits - whole.logits).abs().max()
            assert (whole.logits - found.logits).abs().max() < 2 * rounding


def test_dummy_shares_hold_the_weights_of_the_whole(checkpoints):
    """Put together they are the tensors of one process."""
    path = checkpoints["llama-bias"]
    whole, _ = load_share(model_plan(path, 1, load_format="dummy"), 0)
    ranks = [load_share(model_plan(path, 2, load_format="dummy"), rank)[0] for rank in range(2)]
    eye = torch.eye(whole.spec.q_size)
    for index, layer in enumerate(whole.layers):
        shares = [rank.layers[index] for rank in ranks]
        hidden = torch.eye(whole.spec.hidden_size)
        qkv = [share.qkv(hidden) for share in shares]
        assert torch.equal(torch.cat(qkv, 1), layer.qkv(hidden))
        parts = [share.output(part) for share, part in zip(shares, eye.chunk(2, 1), strict=True)]
        assert torch.equal(sum(parts), layer.output(eye))
    assert torch.equal(ranks[1].embedding, whole.embedding)


def test_a_tensor_is_cut_before_it_is_converted(tmp_path):
    """Of a mapped file only the pages of the part are touched then."""
    path = save(make_model("qwen3").to(torch.bfloat16), tmp_path)
    spec, shard, seen = read_spec(path), Shard(1, 2), {}

    def part(name, tensor):
        seen[name] = (tensor.dtype, tuple(tensor.shape))
        return shard.part(name, tensor)

    with tensors_of(path, spec, dtype=torch.float32, part=part) as read:
        for name, shape in expected_tensors(shard.spec(spec)).items():
            found = read(name)
            assert (found.dtype, tuple(found.shape)) == (torch.float32, shape)
            assert seen[name] == (torch.bfloat16, expected_tensors(spec)[name])


@st.composite
def specs(draw):
    """Shapes that 2 or 3 ranks can share, with whatever biases."""
    size = draw(st.sampled_from([2, 3]))
    kv_heads = size * draw(st.integers(1, 3))
    family = draw(st.sampled_from(["Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM"]))
    return size, {
        "architecture": family,
        "hidden_size": 16 * draw(st.integers(1, 3)),
        "intermediate_size": size * draw(st.integers(1, 40)),
        "num_heads": kv_heads * draw(st.integers(1, 3)),
        "num_kv_heads": kv_heads,
        "head_dim": 2 * draw(st.integers(1, 5)),
        "attention_bias": draw(st.booleans()),
        "mlp_bias": family == "LlamaForCausalLM" and draw(st.booleans()),
        "tie_word_embeddings": draw(st.booleans()),
        "qk_norm": family == "Qwen3ForCausalLM",
    }


@settings(max_examples=30)
@given(drawn=specs())
def test_every_weight_is_in_one_share(checkpoints, drawn):
    """Parts have the shapes that their spec asks for, and together each number once."""
    size, changes = drawn
    whole = dataclasses.replace(read_spec(checkpoints["llama-bias"]), **changes)
    shards = [Shard(rank, size) for rank in range(size)]
    wanted = [expected_tensors(shard.spec(whole)) for shard in shards]
    for name, shape in expected_tensors(whole).items():
        tensor = torch.rand(shape) + 1
        parts = [shard.part(name, tensor) for shard in shards]
        for part, shapes in zip(parts, wanted, strict=True):
            assert tuple(part.shape) == shapes.get(name, shape)
        if name.endswith(("norm.weight", "embed_tokens.weight", "lm_head.weight")):
            assert all(torch.equal(part, tensor) for part in parts)
        elif name.endswith(("down_proj.bias", "o_proj.bias")):
            assert torch.equal(sum(parts), tensor)
        else:
            dim = next(d for d in (0, 1) if parts[0].shape[d] < shape[d])
            assert torch.equal(torch.cat(parts, dim), tensor)
    assert "lm_head.weight" not in wanted[1]


@pytest.mark.parametrize(
    ("case", "tp", "changes", "said"),
    [
        ("qwen3-bias-tied", 2, {}, "has 1 KV heads, which 2 ranks cannot share evenly"),
        ("qwen3", 4, {}, "has 2 KV heads"),
        ("qwen3", 2, {"intermediate_size": 81}, "has an MLP of width 81"),
        ("zero-layer", 2, {}, "has no layers to divide"),
    ],
)
def test_what_cannot_be_divided_is_refused(checkpoints, case, tp, changes, said):
    spec = dataclasses.replace(read_spec(checkpoints[case]), **changes)
    with pytest.raises(ModelUnavailableError) as refused:
        Shard(0, tp).spec(spec)
    assert f"--tp {tp}: " in str(refused.value) and said in str(refused.value)


def test_cases_that_are_left_out_cannot_be_divided(checkpoints):
    left = set(CASES) - set(DIVISIBLE)
    assert left == {"qwen3-bias-tied", "llama3-rope", "yarn-rope", "zero-layer"}
