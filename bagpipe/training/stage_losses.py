"""`StageLosses`: sums of the losses of the stages of a process, and losses that are still to be examined."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from bagpipe.pipeline.stage.runtime import StageRuntime
from bagpipe.pipeline.stream import keep_for_current_stream

__all__ = ["StageLosses"]


class StageLosses:
    """See above.

    Args:
        stages: stage instances of the process -> their stages.
        carried: `LoopRun.carried` of the run.

    Attributes:
        initial: sums by instance, from which the runtime goes on: those of a checkpoint of the same instances.
    """

    def __init__(self, stages: Mapping[int, int], carried: Mapping[str, Any]) -> None:
        sums = {int(number): value for number, value in carried.get("loss_sums", {}).items() if number.isdecimal()}
        # The stages go on with their own sums where the checkpoint's job had the same ones, else rank 0 has them all.
        is_same = sums.keys() == stages.keys()
        self.initial: Mapping[int, float] = sums if is_same else {}
        self._before: float = 0.0 if is_same else carried.get("loss_sum", 0.0)
        self._stages = stages
        self._lock = threading.Lock()
        self._runtime: StageRuntime

    def follow(self, runtime: StageRuntime) -> None:
        """The runtime of the run."""
        self._runtime = runtime

    def sums(self, before: int, is_left_out: Callable[[int], bool]) -> Mapping[str, Tensor]:
        """See `DensePart.loss_sums`, and `StageRuntime.loss_sums` for the arguments."""
        found = self._runtime.loss_sums(before, is_left_out)
        sums = {str(number): value for number, value in found.items()}
        if self._before:
            first = next(iter(sums))
            sums[first] = sums[first] + self._before
        return sums

    def unexamined(self, b: int, stage: int | None) -> Iterator[Tensor]:
        """Losses of batches up to b, each once, of one stage; None: of all."""
        for number, own in self._stages.items():
            losses = self._runtime.runner(number).unchecked
            if stage is None or own == stage:
                with self._lock:  # lanes look at the same time
                    found = [losses.popleft()[1] for _ in range(sum(batch <= b for batch, _ in tuple(losses)))]
                for loss in found:
                    keep_for_current_stream(loss)
                yield from found
