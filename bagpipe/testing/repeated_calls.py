"""`RepeatedCalls`: a fake of CUDA graph capture that runs on any device."""

from __future__ import annotations

import torch

from bagpipe.pipeline.stage.graphs import Recording, Work

__all__ = ["RepeatedCalls"]


class RepeatedCalls:
    """Fake of `Graphs`: a replay calls the function again and writes into the outputs of the first call.

    For tests of code over captured graphs: buffers and their lifetimes are as on a GPU. There is no speedup.
    """

    def record(self, *works: Work) -> tuple[Recording, ...]:
        return tuple(_RepeatedCall(work) for work in works)


class _RepeatedCall:
    def __init__(self, work: Work) -> None:
        self._work = work
        self.outputs = tuple(torch.full_like(output, float("nan")) for output in work())

    def replay(self) -> None:
        for output, made in zip(self.outputs, self._work(), strict=True):
            output.copy_(made)
