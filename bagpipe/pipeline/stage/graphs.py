"""`Graphs`: captures and replays CUDA graphs.

    functions ──warm-up, capture──> a Recording of each: outputs (always the same memory), replay()

A captured function uses static memory, does not synchronise, and enqueues the same work each time. Functions that are
captured together, such as a forward and its backward, share a memory pool: what one leaves there the next ones find.

Rules of `CudaGraphs`: *capture is thread-local*. While a compute lane captures, the other lanes allocate and copy,
which CUDA's global capture mode forbids. The autograd engine's own thread allocates from the private memory pool of the
capture, which torch allows. *A capture waits for nothing on the device*, as `torch.cuda.graph` does: a message that is
being received would come from a rank that waits for this one. *Each lane has a stream of its own for captures*:
libraries keep workspaces by stream, and recordings of two lanes are replayed at the same time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from bagpipe.errors import JobError

__all__ = ["CudaGraphs", "Graphs", "Recording", "open_graphs"]

#: Warm-up calls before a capture: libraries choose algorithms and allocate workspaces, compilers compile. The number is
#: that of torch.cuda.make_graphed_callables.
WARM_UPS = 3

#: The function to capture. Returns its output tensors, the same number each time.
Work = Callable[[], Sequence[Tensor]]


class Recording(Protocol):
    """A captured function.

    Attributes:
        outputs: the function's outputs; every replay overwrites them.
    """

    @property
    def outputs(self) -> tuple[Tensor, ...]: ...

    def replay(self) -> None:
        """Enqueue the captured work on the current stream."""
        ...


class Graphs(Protocol):
    """Captures functions. Thread-safe."""

    def record(self, *works: Work) -> tuple[Recording, ...]:
        """Capture functions that run in this order, over and over. Their recordings must be replayed in this order.

        Warm-up runs all of them several times; the outputs are undefined until a replay.

        Raises:
            JobError: one cannot be captured.
        """
        ...


class CudaGraphs:
    """CUDA's graphs.

    Args:
        device: with an index, or the current one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._own = threading.local()  # a stream of each lane
        self._capturing = threading.Lock()

    def record(self, *works: Work) -> tuple[Recording, ...]:
        # Not the default stream, which CUDA does not record; the same for warm-up and capture, as libraries keep
        # handles and workspaces by stream.
        if not hasattr(self._own, "stream"):
            self._own.stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream = self._own.stream
        current = torch.cuda.current_stream(self._device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                for work in works:
                    work()
            pool = torch.cuda.graph_pool_handle()
            with self._capturing:
                found = tuple(_captured(work, pool) for work in works)
        current.wait_stream(stream)
        return found


def _captured(work: Work, pool: Any) -> _CudaRecording:
    """A function captured on the current stream."""
    graph = torch.cuda.CUDAGraph()
    try:
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            outputs = tuple(work())
        finally:
            graph.capture_end()
    except RuntimeError as error:
        # An error inside spoils the recording, whose end then fails too, and says less.
        reason = str(error.__context__ or error).strip().partition("\n")[0]
        raise JobError(f"the dense part cannot be recorded as a CUDA graph (run.cuda_graph): {reason}") from error
    return _CudaRecording(graph, outputs)


class _CudaRecording:
    def __init__(self, graph: Any, outputs: tuple[Tensor, ...]) -> None:
        self._graph = graph
        self.outputs = outputs

    def replay(self) -> None:
        self._graph.replay()


def open_graphs(device: torch.device) -> Graphs:
    """The graphs of a CUDA device."""
    return CudaGraphs(device)
