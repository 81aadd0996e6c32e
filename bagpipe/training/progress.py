"""Results of a run of training or evaluation: `Progress` so far, `RunResult` at its end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bagpipe.errors import InputError
from bagpipe.pipeline.report import LaneReport, Report

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Progress", "RunResult"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Totals of a run so far.

    Attributes:
        steps, samples: batches and examples done.
        loss_sum: sum over examples of the loss, a scalar on the device (reading it waits for the device).
        rows_unique: unique rows of all batches.
        rows_inserted: those of them that were not in the cache.
        rows_found: those of them that the store had; the others are new.
        rows_fetched: rows asked of the store, for batches read ahead too.
        rows_written: rows written to the store.
        rows_deleted: rows that expired and were deleted; those that were in no store included.
        evictions_waiting: rows that left the cache right after the batch that used them, so that the next forward
            waited for its update (`OwnerPlan.evict_waiting`).
        elapsed_s: wall time.
        exposed_s: time the compute lane waited for rows. On a device that is the thread which enqueues: its stream may
            wait more, or have work all the while; the trace tells.
        skipped_batches: batches that were left out because their loss or gradients were not finite.
        loss_scale: of the batch that comes next.
        share: of all batches of the data, those that are done, as its reader estimates it; None: it does not.
        lanes: times of the lanes, by name.

    After a resume, steps, samples, loss_sum and skipped_batches are of the whole job, the rest of this process.
    """

    steps: int
    samples: int
    loss_sum: Tensor
    rows_unique: int
    rows_inserted: int
    rows_fetched: int
    rows_written: int
    evictions_waiting: int
    elapsed_s: float
    exposed_s: float
    skipped_batches: int = 0
    loss_scale: float = 1
    rows_found: int = 0
    rows_deleted: int = 0
    share: float | None = None
    lanes: Mapping[str, LaneReport] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float:
        """Share of the unique rows that were in the cache when their batch came."""
        return 1.0 - self.rows_inserted / self.rows_unique if self.rows_unique else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """A finished run.

    Attributes:
        progress: its totals.
        report: where its time went.
        input_error: the data went bad after the batches that were done; None if it did not.
        checkpoint_stall_s: what checkpoints cost the lanes: copying what they were about to change, waiting for a
            checkpoint before to be written, closing logs. Added up over lanes; the last checkpoint is not in it.
    """

    progress: Progress
    report: Report
    input_error: InputError | None
    checkpoint_stall_s: float = 0.0
