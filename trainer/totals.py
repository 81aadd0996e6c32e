"""`RankTotals`: training totals of one rank, and their combination over all ranks.

every rank: RankTotals ──gather──> all ranks ──combine──> totals of the job: sums of rows and samples, maxima of times
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bagpipe.errors import JobError
from bagpipe.training.progress import RunResult
from trainer.process import peak_rss_bytes

__all__ = ["RankTotals", "combine", "totals_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTotals:
    """Totals of one rank, or of all ranks (`combine`). Names as in `trainer.result.Result`.

    Attributes:
        samples_before: the part of `samples` trained before this process started.
        loss_sum: sum of the training loss over examples.
        cache_rows: of the fullest rank.
        rows_inserted: unique rows that were not in the cache. rows_found: those of them that the store had.
    """

    steps: int
    samples: int
    samples_before: int
    skipped_batches: int
    loss_scale: float
    checkpoint_stall_s: float
    seconds: float
    loss_sum: float
    rows_unique: int
    rows_inserted: int
    rows_found: int
    rows_fetched: int
    rows_written: int
    evictions_waiting: int
    cache_rows: int
    exposed_s: float
    step_s_p50: float | None
    dense_digest: str
    peak_rss_bytes: int
    rows_deleted: int = 0

    @property
    def loss(self) -> float | None:
        """Mean training loss; None without examples or if it is not finite."""
        loss = self.loss_sum / self.samples if self.samples else math.nan
        return loss if math.isfinite(loss) else None

    @property
    def hit_rate(self) -> float:
        """Share of unique rows that were in a cache at the start of their batch."""
        return 1.0 - self.rows_inserted / self.rows_unique if self.rows_unique else 0.0


def totals_of(
    trained: RunResult, *, seconds: float, dense_digest: str, samples_before: int = 0, cache_rows: int = 0
) -> RankTotals:
    """Totals of this rank after training. Waits for the device."""
    progress, report = trained.progress, trained.report
    return RankTotals(
        steps=progress.steps,
        samples=progress.samples,
        samples_before=samples_before,
        skipped_batches=progress.skipped_batches,
        loss_scale=progress.loss_scale,
        checkpoint_stall_s=trained.checkpoint_stall_s,
        seconds=seconds,
        loss_sum=float(progress.loss_sum),
        rows_unique=progress.rows_unique,
        rows_inserted=progress.rows_inserted,
        rows_found=progress.rows_found,
        rows_fetched=progress.rows_fetched,
        rows_written=progress.rows_written,
        rows_deleted=progress.rows_deleted,
        evictions_waiting=progress.evictions_waiting,
        cache_rows=cache_rows,
        exposed_s=progress.exposed_s,
        step_s_p50=report.steps.quantile_s(0.5) if report.steps.count else None,
        dense_digest=dense_digest,
        peak_rss_bytes=peak_rss_bytes(),
    )


def combine(ranks: Sequence[RankTotals]) -> RankTotals:
    """Totals of the job: counts of rows and examples are summed; times and sizes are maxima.

    Raises:
        JobError: the ranks trained different numbers of batches, or ended with different dense parameters.
    """
    first = ranks[0]
    for rank, other in enumerate(ranks):
        if other.steps != first.steps:
            raise JobError(f"rank 0 trained {first.steps} batches and rank {rank} {other.steps}")
        if other.dense_digest != first.dense_digest:
            raise JobError(
                f"ranks 0 and {rank} ended with different dense parameters, digests {first.dense_digest} and "
                f"{other.dense_digest}: the model keeps rank-local state, or a computation is not reproducible"
            )
    p50s = [rank.step_s_p50 for rank in ranks if rank.step_s_p50 is not None]
    return RankTotals(
        steps=first.steps,
        samples=sum(rank.samples for rank in ranks),
        samples_before=sum(rank.samples_before for rank in ranks),
        skipped_batches=first.skipped_batches,
        loss_scale=first.loss_scale,
        checkpoint_stall_s=max(rank.checkpoint_stall_s for rank in ranks),
        seconds=max(rank.seconds for rank in ranks),
        loss_sum=sum(rank.loss_sum for rank in ranks),
        rows_unique=sum(rank.rows_unique for rank in ranks),
        rows_inserted=sum(rank.rows_inserted for rank in ranks),
        rows_found=sum(rank.rows_found for rank in ranks),
        rows_fetched=sum(rank.rows_fetched for rank in ranks),
        rows_written=sum(rank.rows_written for rank in ranks),
        rows_deleted=sum(rank.rows_deleted for rank in ranks),
        evictions_waiting=sum(rank.evictions_waiting for rank in ranks),
        cache_rows=max(rank.cache_rows for rank in ranks),
        exposed_s=max(rank.exposed_s for rank in ranks),
        step_s_p50=max(p50s) if p50s else None,
        dense_digest=first.dense_digest,
        peak_rss_bytes=max(rank.peak_rss_bytes for rank in ranks),
    )
