"""`Graphs`: records what a function asks of a device, so that it can be asked again at once.

    function ──warm-up, recording──> Recording: outputs (always the same memory), replay()

A function that is recorded reads and writes memory that stays where it is, does not wait for the device, and asks for
the same work each time.

Rule of `CudaGraphs`: *recording is thread-local*. While the compute lane records, the other lanes allocate and copy;
in CUDA's global mode that would spoil the recording. The autograd engine's own thread allocates from the recording's
private memory, which torch exempts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from bagpipe.errors import JobError

__all__ = ["CudaGraphs", "Graphs", "Recording", "RepeatedCalls", "open_graphs"]

#: Calls before a recording: libraries choose algorithms and allocate workspaces, compilers compile. torch's own number
#: for graphed callables.
WARM_UPS = 3

#: Work that is recorded: gives the tensors it has made, as many each time.
Work = Callable[[], Sequence[Tensor]]


class Recording(Protocol):
    """Work that can be done again.

    Attributes:
        outputs: what the function gave; every replay writes them anew.
    """

    @property
    def outputs(self) -> tuple[Tensor, ...]: ...

    def replay(self) -> None:
        """Do the work, on the current stream."""
        ...


class Graphs(Protocol):
    """Makes recordings."""

    def record(self, work: Work) -> Recording:
        """Record work. The work is done, some number of times, on the way; the outputs hold nothing until a replay.

        Raises:
            JobError: it cannot be recorded.
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


class RepeatedCalls:
    """The same on any device, without a gain: calls the function again and writes into the outputs of the first call.

    For tests of what is built on recordings: buffers, and who may use them for how long, are as on a GPU.
    """

    def record(self, work: Work) -> Recording:
        return _RepeatedCall(work)


class _RepeatedCall:
    def __init__(self, work: Work) -> None:
        self._work = work
        self.outputs = tuple(torch.full_like(output, float("nan")) for output in work())

    def replay(self) -> None:
        for output, made in zip(self.outputs, self._work(), strict=True):
            output.copy_(made)


def open_graphs(device: torch.device) -> Graphs:
    """The graphs of a CUDA device."""
    return CudaGraphs(device)
