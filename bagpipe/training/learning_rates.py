"""`LearningRates`: the learning rates of every batch follow schedules (`bagpipe.rates`).

    lookup of b       rate of the row optimizers * factor of b ──> settings of b's row updates       lane compute
    read a batch late the same after the backward of b
    before OPT of b   rate of the dense optimizer * factor of b ──> its parameter groups             lane of the chunk

A factor depends on the number of the batch and on its epoch alone, or on the metrics of the evaluations before it
(`PlateauFactor`). So it is the same with and without a cache, on every rank, in every stage, and after a resume.
The number counts the batches of earlier jobs (`EarlierSteps`); epochs are those of this job.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from bagpipe.errors import InputError
from bagpipe.kernels.interface import map_steps
from bagpipe.rates import Schedule
from bagpipe.schedule.ir.loop_builder import Point
from bagpipe.schedule.ir.program import OpKey
from bagpipe.training.dense import DensePart, ModelChunk
from bagpipe.training.part import Hook, InFlightBatch, LoopPart, LoopRun

__all__ = ["LearningRates", "epoch_of"]


class LearningRates(LoopPart):
    """Schedules of one model's learning rates.

    Args:
        dense: the dense part; its optimizers have the rates that the factors multiply.
        schedule: of the dense optimizers.
        rows: of the row optimizers.
        rows_delay: of the loop: its lookups can be a batch ahead of an evaluation that changes a factor.

    Attributes:
        row_factor: of the latest batch.

    Raises:
        InputError: in a lane: a schedule follows epochs, and a batch does not say in which epoch it is.
    """

    def __init__(self, dense: DensePart, *, schedule: Schedule, rows: Schedule, rows_delay: int = 0) -> None:
        self.row_factor = 1.0
        self._dense = dense
        self._schedule = schedule
        self._rows = rows
        self._rows_delay = rows_delay
        self._rates = {
            name: [group["lr"] for group in chunk.optimizer.param_groups]
            for name, chunk in dense.chunks.items()
            if chunk.optimizer is not None
        }
        self._next_step: dict[str, int] = {}  # of each chunk, by its own lane
        self._run: LoopRun

    def hooks(self) -> Iterable[Hook]:
        # This part is listed after the one that sets the settings of the updates, so its hook comes later. Rows that
        # decay need their rates at the lookup.
        if self._rows_delay:
            yield Hook(at=Point.GRADIENTS, when="after", call=self._scale_rows)
        else:
            yield Hook(at=Point.LOOKUP, when="before", call=self._scale_rows)
        if self._dense.is_staged:
            yield Hook(at=Point.FORWARD, when="before", call=self._before_forward)
        yield Hook(at=Point.STEP, when="before", call=self._set_dense)

    def start(self, run: LoopRun) -> None:
        self._run = run
        self._next_step = dict.fromkeys(self._dense.chunks, run.first_batch)

    def _scale_rows(self, key: OpKey, b: int) -> None:
        batch, factor = self._run.in_flight[b], self._factor(self._rows, b)
        self.row_factor = factor
        batch.row_steps = map_steps(batch.row_steps, lambda step: dataclasses.replace(step, lr=step.lr * factor))

    def _before_forward(self, key: OpKey, index: int) -> None:
        """A forward can predict weights, with the rate of the next step: of an earlier batch, if steps are behind."""
        first = self._dense.starts(key, index)
        if first is not None:
            self._set_rates(self._dense.chunks[first[0]], self._next_step[first[0]])

    def _set_dense(self, key: OpKey, b: int) -> None:
        chunk = self._dense.chunk_of(key)
        if chunk is not None:
            self._next_step[chunk.name] = b + 1
            self._set_rates(chunk, b)

    def _set_rates(self, chunk: ModelChunk, b: int) -> None:
        """Give a chunk's optimizer the rates of a batch's step."""
        if chunk.optimizer is None:
            return
        factor = self._factor(self._schedule, b)
        for group, rate in zip(chunk.optimizer.param_groups, self._rates[chunk.name], strict=True):
            group["lr"] = rate * factor

    def _factor(self, schedule: Schedule, b: int) -> float:
        return schedule.factor(self._run.earlier.schedule + b, self._epoch(b) if schedule.by_epoch else 0)

    def _epoch(self, b: int) -> int:
        return epoch_of(self._run.in_flight[b], "a schedule by epochs")


def epoch_of(batch: InFlightBatch, purpose: str) -> int:
    """Complete passes over the data before a batch.

    Raises:
        InputError: its reader does not say.
    """
    state = batch.rank_batch.batch.reader_state
    epoch = None if state is None else state.get("epoch")
    if not isinstance(epoch, int):
        raise InputError(f"expected the epoch of every batch in the state of the reader, for {purpose}; got {state}")
    return epoch
