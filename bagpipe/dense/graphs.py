"""`Graphs`: captures and replays CUDA graphs.

    function ──warm-up, capture──> Recording: outputs (always the same memory), replay()

A captured function uses static memory, does not synchronise, and enqueues the same work each time.

Rule of `CudaGraphs`: *capture is thread-local*. While the compute lane captures, the other lanes allocate and copy,
which CUDA's global capture mode forbids. The autograd engine's own thread allocates from the private memory pool of the
capture, which torch allows.
"""

from __future__ import annotations

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
    """Captures functions."""

    def record(self, work: Work) -> Recording:
        """Capture a function. Warm-up runs it several times; the outputs are undefined until a replay.

        Raises:
            JobError: it cannot be captured.
        """
        ...


class CudaGraphs:
    """CUDA's graphs.

    Args:
        device: with an index, or the current one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def record(self, work: Work) -> Recording:
        # A stream of its own, for CUDA does not record the default one; the same for both, as libraries keep handles
        # and workspaces by stream.
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream(self._device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                work()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                outputs = tuple(work())
        except RuntimeError as error:
            # An error inside spoils the recording, whose end then fails too, and says less.
            reason = str(error.__context__ or error).strip().partition("\n")[0]
            raise JobError(f"the dense part cannot be recorded as a CUDA graph (run.cuda_graph): {reason}") from error
        current.wait_stream(stream)
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
