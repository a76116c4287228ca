"""Capture once, replay often: CUDA graphs, and what stands for them where there is no device.

All graphs of a worker share one memory pool and one stream, so only one may run at a time and its
results must be taken before the next; what outlives a replay lies in buffers outside the pool.
Capture in mode *thread_local*: other threads may go on using CUDA meanwhile.

:class:`ReplayOnCpu` runs the captured function again, over the same static buffers. It shows that
everything around a graph is right; nothing of its speed is a graph's.

Knows functions; nothing of what they compute. Unproven on a device.
"""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Work = Callable[[], None]

_ASK_FOR_VALUES: Final = frozenset(
    {
        torch.ops.aten._local_scalar_dense.default,
        torch.ops.aten.equal.default,
        # What the first is called in inference mode.
        torch.ops.aten.is_nonzero.default,
        torch.ops.aten.item.default,
        torch.ops.aten.masked_select.default,
        torch.ops.aten.nonzero.default,
    }
)


class Graph(ABC):
    """Work of a fixed shape over fixed buffers."""

    @abstractmethod
    def capture(self, work: Work) -> None:
        """Keep what ``work`` launches, having run it. Its inputs must be valid by now."""

    @abstractmethod
    def replay(self) -> None:
        """Launch it again, over what the buffers hold then."""

    @abstractmethod
    def reset(self) -> None:
        """Free what was captured; no replay follows."""


class GraphDevice(Protocol):
    """Where graphs are captured and steps end.

    Attributes:
        name: for messages; says whether anything is emulated.
    """

    name: str

    def graph(self) -> Graph:
        """A graph to capture; it shares the memory of the others."""

    def submitted(self) -> None:
        """All that a step needs has been launched, its transfers to the host included."""

    def wait(self) -> None:
        """Return once what was last :meth:`submitted` is done."""

    def synchronize(self) -> None:
        """Return once everything launched is done."""


class CudaGraph(Graph):
    """A CUDA graph on the current stream, which must not be the default one."""

    def __init__(self, owner: CudaGraphs) -> None:
        self._owner = owner
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, work: Work) -> None:
        """Run ``work`` twice, then capture it: kernels are compiled, libraries have workspaces.

        Raises:
            RuntimeError: it did something that cannot be captured.
        """
        work()
        # What waits for the device cannot be captured, and fails here with nothing to undo.
        with _waits_refused():
            work()
        torch.cuda.current_stream().synchronize()
        pool = self._owner.pool
        try:
            self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            work()
        except BaseException:
            self._abandon()
            raise
        try:
            self._graph.capture_end()
        except RuntimeError:
            self._owner.give_up(self._graph)
            raise

    def _abandon(self) -> None:
        """Leave capture mode; the error that led here says more than the one that this raises."""
        try:
            self._graph.capture_end()
        except RuntimeError:
            self._owner.give_up(self._graph)

    def replay(self) -> None:
        """Launch the graph."""
        self._graph.replay()

    def reset(self) -> None:
        """Free the graph."""
        self._graph.reset()


class CudaGraphs:
    """A GPU: one stream of its own for all steps of this thread, one pool for all graphs.

    Attributes:
        pool: the memory of the graphs to come.
    """

    name = "CUDA graphs"

    def __init__(self, device: torch.device) -> None:
        torch.cuda.set_device(device)
        # What was loaded until now was launched on another stream.
        torch.cuda.synchronize(device)
        # Everything that this thread launches goes there from now on, whoever launches it.
        torch.cuda.set_stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
        self.pool = torch.cuda.graph_pool_handle()
        self._given_up: list[torch.cuda.CUDAGraph] = []
        # The waiting thread spins: the wake-up of a blocking wait takes longer than a small step.
        self._done = torch.cuda.Event(blocking=False)  # type: ignore[no-untyped-call]

    def graph(self) -> Graph:
        """A graph in the common pool."""
        return CudaGraph(self)

    def give_up(self, graph: torch.cuda.CUDAGraph) -> None:
        """Let others be captured although the capture of ``graph`` could not be ended.

        torch's allocator still takes it for under way: it would refuse the pool to other captures,
        and asks the graph about every allocation, so that must stay.
        """
        self._given_up.append(graph)
        with suppress(AttributeError, RuntimeError):
            # No public function ends it; without it memory that is short is not given back.
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self.pool)
        self.pool = torch.cuda.graph_pool_handle()

    def submitted(self) -> None:
        """Record the event behind everything that was launched."""
        self._done.record()

    def wait(self) -> None:
        """Wait for the event."""
        self._done.synchronize()

    def synchronize(self) -> None:
        """Wait for the stream."""
        torch.cuda.current_stream().synchronize()


@contextmanager
def _waits_refused() -> Iterator[None]:
    """Operations of torch that wait for the device raise RuntimeError meanwhile, in any thread."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


class ReplayOnCpu(Graph):
    """No graph: replays by running the function again, on the CPU.

    Args:
        strict: refuse, as a graph would, functions that ask a tensor for a value (``float(x)``,
            ``if x``). What watches for that takes more than a second to import.
    """

    def __init__(self, *, strict: bool = True) -> None:
        self._strict = strict
        self._work: Work = _nothing

    def capture(self, work: Work) -> None:
        """Run ``work`` once and keep it.

        Raises:
            RuntimeError: it asked for a value.
        """
        if self._strict:
            with _NoValues():  # type: ignore[no-untyped-call]
                work()
        else:
            work()
        self._work = work

    def replay(self) -> None:
        """Run it again."""
        self._work()

    def reset(self) -> None:
        """Forget it."""
        self._work = _nothing


class _NoValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operations whose result depends on a value that only the device has."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _ASK_FOR_VALUES:
            raise RuntimeError(f"{func} asks for a value, and no graph can capture that")
        return func(*args, **(kwargs or {}))


class NoGraphsOnCpu:
    """Stands for a GPU on the CPU, where all is done as soon as it is launched.

    Args:
        strict: see :class:`ReplayOnCpu`.
    """

    name = "graphs emulated on the CPU"

    def __init__(self, *, strict: bool = True) -> None:
        self._strict = strict

    def graph(self) -> Graph:
        """What stands for a graph."""
        return ReplayOnCpu(strict=self._strict)

    def submitted(self) -> None:
        """It is done by now."""

    def wait(self) -> None:
        """It is done by now."""

    def synchronize(self) -> None:
        """It is done by now."""


def graph_device(device: torch.device) -> GraphDevice:
    """What captures graphs on ``device``; the CPU only stands for one."""
    return CudaGraphs(device) if device.type == "cuda" else NoGraphsOnCpu()


def freeze_after_capture() -> None:
    """Nothing captured is garbage: the collector need never walk it again.

    What torch has over is given back: links and libraries allocate on the GPU without asking it.
    """
    gc.collect()
    gc.freeze()
    torch.cuda.empty_cache()


def _nothing() -> None:
    """Nothing was captured."""
