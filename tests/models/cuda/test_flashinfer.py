"""What flashinfer is told: by a stand-in that computes it, and against the real one's signatures.

The stand-in keeps to what the real wrappers do with their arguments; that the real kernels compute
the same, only a device can show.
"""

import ast
import importlib.util
import sys
import types
from pathlib import Path

import pytest
import torch

from tests.models.cuda import batches
from trserve.errors import ModelUnavailableError
from trserve.models.cuda import attention
from trserve.models.cuda.attention import BatchGeometry, PagedLayers, choose_backend
from trserve.models.cuda.attention_flashinfer import (
    FlashinferAttention,
    _workspace_size,
    use_tensor_cores,
)
from trserve.models.cuda.attention_torch import TorchAttention

SPEC = importlib.util.find_spec("flashinfer")


class StandIn:
    """Either wrapper: in a graph it reads its buffers alone, whose sizes are fixed."""

    made: list["StandIn"]

    def __init__(self, workspace, **options):
        assert not workspace.any()
        self.options, self.plans = options, []
        self._int_workspace_buffer = torch.zeros(8)
        self._pin_memory_int_workspace_buffer = torch.zeros(8)
        assert options.pop("kv_layout") == "HND"
        self.graph = options.pop("use_cuda_graph")
        self.backend = options.pop("backend")
        self.cores = options.pop("use_tensor_cores", None)
        self.buffers = list(options.values())
        assert bool(self.buffers) == self.graph
        StandIn.made.append(self)

    def use(self, *arrays, **options):
        if not self.graph:
            self.buffers = [array.clone() for array in arrays]
        for buffer, array in zip(self.buffers, arrays, strict=True):
            assert array.dtype == torch.int32
            assert not self.graph or len(array) == len(buffer) or array is arrays[-2]
            buffer[: len(array)].copy_(array)
        self.plans.append(options)

    def attend(self, q, cache, out):
        starts, firsts, blocks, lasts = self.buffers
        size, heads = cache.shape[3], q.shape[1]
        for row in range(len(lasts)):
            own = blocks[int(firsts[row]) : int(firsts[row + 1])].long()
            length = (len(own) - 1) * size + int(lasts[row])
            keys, values = cache[own].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]
            first, last = int(starts[row]), int(starts[row + 1])
            for token in range(first, last):
                seen = length - (last - 1 - token)
                for head in range(heads):
                    group = head * len(keys) // heads
                    scores = keys[group, :seen] @ q[token, head] * self.plans[-1]["sm_scale"]
                    out[token, head] = scores.softmax(0) @ values[group, :seen]


class Decode(StandIn):
    def plan(self, indptr, indices, last, heads, kv_heads, dim, page, **options):
        assert "causal" not in options
        self.use(indptr, indices, last, **options)

    def run(self, q, cache, out):
        self.buffers.insert(0, torch.arange(len(q) + 1))
        self.attend(q, cache, out)
        self.buffers.pop(0)


class Prefill(StandIn):
    def plan(self, starts, indptr, indices, last, heads, kv_heads, dim, page, **options):
        assert options["causal"] is True
        self.use(starts, indptr, indices, last, **options)

    def run(self, q, cache, out):
        self.attend(q, cache, out)


@pytest.fixture
def stand_in(monkeypatch):
    StandIn.made = []
    module = types.ModuleType("flashinfer")
    module.BatchDecodeWithPagedKVCacheWrapper = Decode
    module.BatchPrefillWithPagedKVCacheWrapper = Prefill
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr("trserve.models.cuda.attention_flashinfer._workspace_size", lambda _: 64)
    return StandIn.made


def attend(backend: FlashinferAttention, batch: batches.Batch) -> None:
    """Plan and run ``batch``, and hold it against the formula."""
    out = torch.full_like(batch.q, torch.nan)
    backend.plan(batch.geometry)
    backend._paged.layers[0].copy_(batch.layer)
    backend.run(0, batch.q, out)
    torch.testing.assert_close(out.double(), batches.expected(batch), atol=1e-5, rtol=1e-5)


def test_every_kind_of_step_reaches_the_wrapper_made_for_it(stand_in):
    # All over caches of one size, so that one backend can serve them.
    eager = batches.make([(1, 5), (1, 12), (1, 0)])
    graph = batches.make([(1, 5), (1, 12), (1, 0)], bucket=4)
    suffixes = batches.make([(2, 4), (2, 11), (2, 0)], bucket=4)
    ragged = batches.make([(3, 3), (2, 11), (1, 0)])
    backend = FlashinferAttention(graph.paged)
    for batch in (eager, graph, suffixes, ragged, graph, eager, suffixes):
        attend(backend, batch)
    kinds = [(type(wrapper).__name__, wrapper.graph, len(wrapper.plans)) for wrapper in stand_in]
    assert kinds == [
        ("Decode", False, 2),
        ("Decode", True, 2),
        ("Prefill", True, 2),
        ("Prefill", False, 1),
    ]
    assert stand_in[2].backend == "fa2"
    own = {id(wrapper._int_workspace_buffer) for wrapper in stand_in}
    pinned = {id(wrapper._pin_memory_int_workspace_buffer) for wrapper in stand_in}
    assert len(own) == len(pinned) == 1


def test_plans_say_types_scale_and_lengths(stand_in):
    batch = batches.make([(1, 5), (1, 12)], bucket=4)
    backend = FlashinferAttention(batch.paged)
    backend.plan(batch.geometry)
    (options,) = stand_in[0].plans
    assert options["seq_lens"].tolist() == [6, 13, 1, 1]
    assert options["q_data_type"] == options["kv_data_type"] == torch.float32
    assert options["sm_scale"] == 16**-0.5
    assert options["non_blocking"] is True


def test_plans_of_wider_rows_say_how_wide(stand_in):
    batch = batches.make([(3, 5), (7, 12)])
    FlashinferAttention(batch.paged).plan(batch.geometry)
    (options,) = stand_in[0].plans
    assert options["max_token_per_sequence"] == 7 and options["causal"] is True


def test_what_a_compiler_says_is_told_and_not_that_the_build_stopped(stand_in, monkeypatch):
    def plan(*arrays, **options):
        raise RuntimeError(
            "Ninja build failed\nFAILED: a.o\nx.cu(3): error: no\nninja: build stopped."
        )

    monkeypatch.setattr(Decode, "plan", plan)
    batch = batches.make([(1, 5)])
    with pytest.raises(ModelUnavailableError, match=r"\(x.cu\(3\): error: no\)"):
        FlashinferAttention(batch.paged).plan(batch.geometry)


def test_kernels_that_cannot_be_built_are_one_clear_error(stand_in, monkeypatch):
    def plan(*arrays, **options):
        raise RuntimeError("a long story\nCould not find nvcc")

    monkeypatch.setattr(Decode, "plan", plan)
    batch = batches.make([(1, 5)])
    with pytest.raises(ModelUnavailableError, match=r"\(Could not find nvcc\); it needs nvcc"):
        FlashinferAttention(batch.paged).plan(batch.geometry)


def test_a_workspace_that_is_too_small_is_called_so(stand_in, monkeypatch):
    def plan(*arrays, **options):
        raise RuntimeError(
            "Buffer overflow when allocating memory for batch_prefill_tmp_v with size 9 and "
            "alignment 16, but only 8 bytes available in AlignedAllocator. Increase it.\nat plan"
        )

    monkeypatch.setattr(Decode, "plan", plan)
    batch = batches.make([(1, 5)])
    with pytest.raises(ModelUnavailableError, match=r"workspace is too small.*batch_prefill_tmp_v"):
        FlashinferAttention(batch.paged).plan(batch.geometry)


@pytest.fixture
def chosen(stand_in, monkeypatch):
    """flashinfer as ``auto`` would take it, on the CPU; torch's own stands for triton."""
    monkeypatch.setattr(attention, "_resolve", lambda name, paged: "flashinfer")
    monkeypatch.setattr("trserve.models.cuda.attention_triton.TritonAttention", TorchAttention)
    return stand_in


def test_kernels_are_there_before_anybody_waits_for_them(chosen):
    """Of both kinds: decodes, and rows of several tokens."""
    batch = batches.make([(3, 5), (1, 2)])
    backend = choose_backend("auto", batch.paged)
    assert [type(wrapper) for wrapper in chosen] == [Decode, Prefill]
    assert all(len(wrapper.plans) == 1 and not wrapper.graph for wrapper in chosen)
    attend(backend, batch)
    assert len(chosen) == 2


@pytest.mark.parametrize("kind", [Decode, Prefill])
@pytest.mark.parametrize("method", ["plan", "run"])
def test_auto_steps_over_a_flashinfer_that_builds_no_kernels(
    chosen, monkeypatch, caplog, kind, method
):
    def fails(*arguments, **options):
        raise RuntimeError("Could not find nvcc")

    monkeypatch.setattr(kind, method, fails)
    batch = batches.make([(3, 5), (1, 2)])
    assert choose_backend("auto", batch.paged).name == "torch"
    assert caplog.text.count("Could not find nvcc") == 1
    with pytest.raises((ModelUnavailableError, RuntimeError), match="Could not find nvcc"):
        choose_backend("flashinfer", batch.paged)


def test_the_workspace_serves_the_graphs_that_there_will_be(monkeypatch):
    properties = types.SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: properties)
    layer = torch.empty(3, 2, 8, 16, 128, device="meta")
    paged = PagedLayers([layer], 64, 64, 2048, 128, graphs=[(64, 8), (2, 8), (64, 1)])
    assert _workspace_size(paged) == 383 << 20


@pytest.mark.parametrize(("group", "cores"), [(1, False), (3, False), (4, True), (5, True), (7, 1)])
def test_tensor_cores_take_every_group_that_the_other_kernel_may_lack(stand_in, group, cores):
    assert use_tensor_cores(group) == bool(cores)
    batch = batches.make([(1, 5)], group=group)
    FlashinferAttention(batch.paged).plan(BatchGeometry.of(batch.step))
    assert stand_in[0].cores == bool(cores)
    assert stand_in[0].backend == ("fa2" if cores else "auto")


def parameters(file: str, class_name: str, method: str) -> set[str]:
    """All parameters of a method of the installed flashinfer, read without importing it."""
    for node in ast.walk(ast.parse((Path(SPEC.origin).parent / file).read_text())):
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            return {
                argument.arg
                for function in node.body
                if isinstance(function, ast.FunctionDef) and function.name.startswith(method)
                for argument in function.args.args + function.args.kwonlyargs
            }
    raise AssertionError(f"{class_name} is not in {file}")


@pytest.mark.skipif(SPEC is None, reason="flashinfer is not installed: signatures not checked")
@pytest.mark.parametrize("width", [1, 2])
def test_the_installed_flashinfer_takes_what_it_is_told(stand_in, width, monkeypatch):
    batch = batches.make([(width, 5)], bucket=2)
    said = {}
    base = Decode if width == 1 else Prefill

    class Listener(base):
        def __init__(self, workspace, **options):
            said["__init__"] = set(options)
            super().__init__(workspace, **options)

        def plan(self, *arrays, **options):
            said["plan"] = set(options)
            super().plan(*arrays, **options)

    kind, file = ("Decode", "decode.py") if width == 1 else ("Prefill", "prefill.py")
    name = f"Batch{kind}WithPagedKVCacheWrapper"
    monkeypatch.setattr(sys.modules["flashinfer"], name, Listener)
    backend = FlashinferAttention(batch.paged)
    backend.plan(batch.geometry)
    for method, options in (*said.items(), ("run", {"out"})):
        known = parameters(file, name, method) | parameters(file, name, f"_{method}")
        assert options <= known, (method, options - known)
