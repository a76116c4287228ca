"""What stands for a graph behaves like one as far as it goes; what it emulates it says."""

from __future__ import annotations

import pytest
import torch

from trserve.workers.cuda.graphs import CudaGraphs, NoGraphsOnCpu, ReplayOnCpu, graph_device
from trserve.workers.cuda.host_time import EmptyGraph


def test_a_replay_reads_and_writes_the_same_buffers():
    static, out = torch.zeros(3), torch.zeros(3)

    def work() -> None:
        out.copy_(static + 1)

    graph = ReplayOnCpu()
    graph.capture(work)
    assert out.tolist() == [1.0] * 3
    static.fill_(5.0)
    graph.replay()
    assert out.tolist() == [6.0] * 3
    graph.reset()
    static.zero_()
    graph.replay()
    assert out.tolist() == [6.0] * 3


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(
    "asks",
    [
        lambda x: float(x.max()),
        lambda x: x.sum().item(),
        lambda x: 1 if x.any() else 0,
        lambda x: x.nonzero(),
        lambda x: x.masked_select(x > 0),
    ],
)
def test_what_no_graph_could_capture_is_refused(asks, inference):
    with torch.inference_mode(inference), pytest.raises(RuntimeError, match="no graph can capture"):
        ReplayOnCpu().capture(lambda: asks(torch.ones(3)))


def test_an_empty_graph_runs_once():
    calls: list[None] = []
    graph = EmptyGraph()
    graph.capture(lambda: calls.append(None))
    graph.replay()
    assert len(calls) == 1


def test_the_cpu_says_that_it_emulates():
    device = graph_device(torch.device("cpu"))
    assert isinstance(device, NoGraphsOnCpu) and "emulated on the CPU" in device.name


class StandIn:
    """``torch.cuda`` as far as graphs go, with what torch does when a capture fails.

    ``cudaStreamEndCapture`` raises before the allocator is told, so the pool counts as under way;
    ``reset`` changes nothing about that.
    """

    def __init__(self, monkeypatch, *, can_end=True):
        self.underway, self.ended, self.pools = set(), [], 0
        self.mode, self.capturing, self.broken, self.events = 0, False, False, []
        for name in ("set_device", "synchronize", "set_stream", "Stream", "Event"):
            monkeypatch.setattr(torch.cuda, name, lambda *_, **__: None)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: Captured(self))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", self.graph_pool_handle)
        monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: self.mode)
        monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", self.set_mode)
        if can_end:
            monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self.end, raising=False)
        else:
            monkeypatch.delattr(torch._C, "_cuda_endAllocateToPool", raising=False)

    def graph_pool_handle(self):
        self.pools += 1
        return (0, self.pools)

    def set_mode(self, mode):
        self.mode = {"error": 2}.get(mode, mode)

    def end(self, device, pool):
        self.underway.remove(pool)
        self.ended.append(pool)

    def synchronize(self):
        assert not self.capturing and self.mode == 0

    def waits(self):
        """What a function does that waits for the device."""
        if self.mode == 2:
            raise RuntimeError("called a synchronizing CUDA operation")
        self.broken = self.capturing
        if self.broken:
            raise RuntimeError("operation not permitted when stream is capturing")

    def waits_unseen(self):
        """The same, by a library of which torch's check knows nothing."""
        self.broken = self.capturing
        if self.broken:
            raise RuntimeError("operation not permitted when stream is capturing")


class Captured:
    def __init__(self, cuda):
        self.cuda, self.pool = cuda, None

    def capture_begin(self, pool, capture_error_mode):
        assert capture_error_mode == "thread_local" and not self.cuda.capturing
        if pool in self.cuda.underway:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        self.cuda.underway.add(pool)
        self.cuda.capturing, self.pool = True, pool

    def capture_end(self):
        assert self.cuda.capturing
        broken, self.cuda.capturing, self.cuda.broken = self.cuda.broken, False, False
        if broken:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.cuda.underway.remove(self.pool)


def test_what_waits_for_the_device_is_found_before_the_capture(monkeypatch):
    cuda = StandIn(monkeypatch)
    device, runs = CudaGraphs(torch.device("cuda", 0)), []

    def work():
        runs.append(cuda.capturing)
        cuda.waits()

    with pytest.raises(RuntimeError, match="synchronizing"):
        device.graph().capture(work)
    assert runs == [False, False] and cuda.mode == 0 and cuda.pools == 1
    device.graph().capture(lambda: runs.append(cuda.capturing))
    assert runs[2:] == [False, False, True]


@pytest.mark.parametrize("can_end", [True, False])
def test_after_a_capture_that_failed_others_are_captured(monkeypatch, can_end):
    cuda = StandIn(monkeypatch, can_end=can_end)
    device = CudaGraphs(torch.device("cuda", 0))
    device.graph().capture(int)
    first = device.pool
    with pytest.raises(RuntimeError, match="not permitted"):
        device.graph().capture(cuda.waits_unseen)
    assert not cuda.capturing
    assert device.pool != first and cuda.ended == [first] * can_end
    # The allocator still asks it.
    assert [graph.pool for graph in device._given_up] == [first]
    device.graph().capture(int)
    assert cuda.underway == (set() if can_end else {first})


def test_an_error_of_the_work_alone_spoils_nothing(monkeypatch):
    cuda = StandIn(monkeypatch)
    device = CudaGraphs(torch.device("cuda", 0))

    def work():
        if cuda.capturing:
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        device.graph().capture(work)
    assert not cuda.underway and cuda.pools == 1 and not device._given_up


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no device: CUDA graphs need a GPU")
def test_a_cuda_graph_replays_what_it_captured():
    device = graph_device(torch.device("cuda", 0))
    static, out = torch.zeros(3, device="cuda"), torch.zeros(3, device="cuda")

    def work() -> None:
        out.copy_(static + 1)

    graph = device.graph()
    graph.capture(work)
    static.fill_(5.0)
    graph.replay()
    device.submitted()
    device.wait()
    assert out.tolist() == [6.0] * 3
    with pytest.raises(RuntimeError):
        device.graph().capture(lambda: print(float(static.sum())))
    graph.replay()
    device.synchronize()
    graph.reset()
