"""`Training`: forward, backward, updates of every batch. `TrainingOfRanks`: with rows and gradients on their ways."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bagpipe.cache.batch_context import BatchContext
from bagpipe.cache.lookup import ActiveTableGroup
from bagpipe.cache.row_exchange import RowExchange
from bagpipe.checkpoint.recorder import NoRecorder
from bagpipe.errors import InputError
from bagpipe.kernels.interface import RowStep
from bagpipe.oracle.handles import dense_sizes
from bagpipe.oracle.rank_batch import RankBatch
from bagpipe.store.interface import WriteRequest
from bagpipe.training.nonfinite import NonfiniteGuard
from bagpipe.training.phase import Phase
from bagpipe.training.progress import PhaseResult, Progress

if TYPE_CHECKING:
    from bagpipe.training.engine import Engine

__all__ = ["Training", "TrainingOfRanks"]


class Training(Phase):
    """One rank, the model whole."""

    train = True

    def __init__(
        self,
        engine: Engine,
        batches: Iterator[RankBatch],
        *,
        first_batch: int = 0,
        carried: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        super().__init__(engine, batches, first_batch=first_batch, carried=carried)
        self.recorder = engine.recorder if engine.recorder is not None else NoRecorder()
        peers = engine.peers
        self.guard = NonfiniteGuard(
            engine.cache.streams,
            rank=None if peers is None else peers.rank,
            skips=engine.settings.nonfinite == "skip",
            hint=engine.dense.precision.loss_scale.hint,
        )
        #: Of the batch that is computed.
        self.loss_scale = engine.dense.precision.loss_scale.resumed(carried)
        if self.loss_scale.growth_interval and (not self.guard.skips or engine.pipeline is not None):
            raise InputError("a loss scale that grows needs batches that can be left out, and no stages")
        self.buffers: dict[str, Tensor] = {}

    def run(self) -> PhaseResult:
        self.recorder.watch(self.guard.check_before)
        # Before the step and after the sums over ranks, which may still be on their way when the backward is over, and
        # whose own hook is there already.
        hook = self.engine.optimizer.register_step_pre_hook(self._unscale)
        try:
            return super().run()
        finally:
            hook.remove()

    def _unscale(self, *_: object) -> None:
        self.loss_scale.unscale_parameters(self.engine.model.parameters())

    def handlers(self) -> Mapping[str, Callable[[int], None]]:
        return {
            "X_READ": self.read,
            "X_FETCH": self.get,
            "X_EVICT": self.evict,
            "X_INSERT": self.put,
            "F": self.compute_forward,
            "B": self.backward,
            "X_UPDATE": self.update,
            "OPT": self.dense_step,
            "X_WRITEBACK": self.store,
        }

    def read(self, b: int) -> None:
        super().read(b)
        if b == self.first_batch:
            # Only now: bad input must leave the store untouched. A namespace made by this job holds no rows yet.
            # Without a cache everything is read: there is nothing to be clever about.
            self.skip_new = self.engine.claim() and self.cache.is_fixed

    def evict(self, b: int) -> None:
        flight = self.in_flight[b]
        flight.writes, flight.epoch = self.cache.evict_in_epoch(flight.rank_batch.owner)

    def compute_forward(self, b: int) -> None:
        self.recorder.before_forward(b, self.loss_sum)
        if self.guard.skips:
            self.buffers = {name: buffer.clone() for name, buffer in self.engine.model.named_buffers()}
        flight = self.in_flight[b]
        self.begin(flight.context)
        if flight.inputs is not None:  # few models take an empty batch
            num_examples = flight.rank_batch.num_global_examples
            flight.work = self.engine.dense.forward(flight.inputs, num_examples, self.loss_scale)
            flight.loss_sum = flight.work.loss_sum

    def backward(self, b: int) -> None:
        flight = self.in_flight[b]
        work, flight.work = flight.work, None
        if work is not None:
            work.backward()
        current = self.cache.current
        groups = () if current is None else current.groups
        self.loss_scale.unscale_rows(groups)
        flight.is_skipped = self.guard.is_bad(
            b,
            loss=None if work is None else work.loss,
            parameters=self.engine.model.named_parameters(),
            groups=groups,
        )
        if not self.guard.skips:
            self.add_loss(b)

    def row_step(self, b: int) -> RowStep:
        settings = self.engine.settings
        return RowStep(lr=settings.rows_lr, eps=settings.eps, step=b + 1)

    def update(self, b: int) -> None:
        self.recorder.before_update(b, self.counts)
        flight = self.in_flight[b]
        if flight.is_skipped:
            drop(self.cache.end(flight.context))
        else:
            self.cache.update(flight.context, self.row_step(b))

    def dense_step(self, b: int) -> None:
        flight = self.in_flight[b]
        flight.is_skipped = self.settle(flight.is_skipped)
        if flight.is_skipped:
            with torch.no_grad():
                for name, buffer in self.engine.model.named_buffers():
                    buffer.copy_(self.buffers[name])
        else:
            self.engine.optimizer.step()
        if self.guard.skips:
            self.buffers = {}
            if not flight.is_skipped:
                self.add_loss(b)
        self.engine.optimizer.zero_grad(set_to_none=True)

    def settle(self, is_bad: bool) -> bool:
        """Whether a batch that is bad here is to be skipped; the same on all ranks."""
        return is_bad

    def counts(self) -> Mapping[str, Any]:
        """State after the batches done, for `Part.progress`."""
        return {
            "samples": self.samples,
            "skipped_batches": self.num_skipped,
            "reader_state": self.reader_state,
            **self.loss_scale.carried(),
        }

    def done(self, b: int) -> None:
        # Not with the step: a checkpoint before b takes what is counted when rows change, which on ranks is later.
        self.loss_scale = self.loss_scale.after(is_finite=not self.in_flight[b].is_skipped)
        super().done(b)

    def progress(self) -> Progress:
        return dataclasses.replace(super().progress(), loss_scale=self.loss_scale.value)

    def store(self, b: int) -> None:
        flight = self.in_flight[b]
        # On a device the lane has waited for the eviction by now, so the rows are here.
        self.write(flight.writes(), flight.epoch, b)
        flight.writes = list

    def write(self, requests: Sequence[WriteRequest], epoch: int, step: int) -> None:
        """Write rows back that left the cache in an epoch for a batch."""
        self.guard.check()
        self.recorder.before_write(epoch)
        self.engine.store.write_many(requests)
        self.recorder.after_write(requests, epoch, step)
        self.rows_written += sum(len(request.ids) for request in requests)

    def end(self) -> None:
        """Write back what is still dirty; then the last checkpoint."""
        self.guard.check()
        self.recorder.drain()
        for requests in self.cache.flush():
            self.write(requests, self.cache.snapshot.epoch, self.num_steps)
        self.recorder.finish(self.num_steps, self.counts, self.loss_sum, self.instance_sums())

    def instance_sums(self) -> Mapping[int, Tensor]:
        """Sums of losses by instance, where there are instances."""
        return {}

    def stall_s(self) -> float:
        return self.recorder.stall_s


class TrainingOfRanks(Training):
    """Rows and gradients travel between the ranks."""

    row_waits = ("0X_INSERT", "0X_PULL", "0X_PUSH")

    def __init__(
        self,
        engine: Engine,
        batches: Iterator[RankBatch],
        *,
        first_batch: int = 0,
        carried: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        super().__init__(engine, batches, first_batch=first_batch, carried=carried)
        assert engine.peers is not None, "one rank trains without"
        self.peers = engine.peers
        self.exchange = RowExchange(engine.cache, engine.peers)
        # Of unbounded tables a planner remembers hashes of ids, or nothing: it may take a new row for an old one.
        is_remembered = dense_sizes([table.rows for table in engine.cache.schema.tables]) is not None
        self.plan_is_exact = is_remembered and not self.guard.skips

    def handlers(self) -> Mapping[str, Callable[[int], None]]:
        return {
            **super().handlers(),
            "X_PREPULL": lambda b: self.exchange.early(self.in_flight[b].context),
            "X_PULL": lambda b: self.exchange.pull(self.in_flight[b].context),
            "X_PUSH": self.push,
            "X_PUSH_LATE": lambda b: self.exchange.push_late(self.in_flight[b].groups),
            "X_UPDATE_LATE": self.update_late,
            "X_ACK": lambda b: self.peers.acknowledge(),
        }

    def begin(self, context: BatchContext) -> None:
        self.exchange.begin(context)

    def push(self, b: int) -> None:
        flight = self.in_flight[b]
        flight.groups = self.exchange.push(flight.context)

    def update(self, b: int) -> None:
        self.recorder.before_update(b, self.counts)
        flight = self.in_flight[b]
        if not flight.is_skipped:
            self.guard.watch(b, self.exchange.arrived())
            self.exchange.update(flight.context, self.row_step(b))

    def update_late(self, b: int) -> None:
        self.recorder.before_update(b, self.counts, drains=False)
        flight = self.in_flight[b]
        if not flight.is_skipped:
            self.guard.watch(b, self.exchange.arrived_late())
            self.exchange.update_late(flight.context, self.row_step(b))

    def was_written(self, b: int, table: int, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Another rank may have written a row: then only the plan tells, where it knows exactly what came before.

        On several ranks a row that is planned is updated, so it is written when it leaves, unless its batch is skipped.
        """
        found = super().was_written(b, table, ids)
        owner = self.in_flight[b].rank_batch.owner
        if not self.plan_is_exact or self.engine.recorder is None:
            return found
        rows = slice(int(owner.fetch.table_offsets[table]), int(owner.fetch.table_offsets[table + 1]))
        return found | np.isin(ids, owner.fetch.ids[rows][owner.fetch_new[rows]], invert=True)

    def settle(self, is_bad: bool) -> bool:
        settle = self.engine.settle
        return settle(is_bad) if self.guard.skips and settle is not None else is_bad


def drop(groups: Sequence[ActiveTableGroup]) -> None:
    """Forget the gradients of a batch that is skipped."""
    for group in groups:
        group.gradients.clear()
