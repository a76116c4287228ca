"""What stands for a graph behaves like one as far as it goes; what it emulates it says."""

from __future__ import annotations

import pytest
import torch

from trserve.workers.cuda.graphs import NoGraphsOnCpu, ReplayOnCpu, graph_device
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
