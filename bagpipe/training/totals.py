"""`Totals`: counts the batches of a run, their examples and rows; and what is made of the counts: `Progress`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from bagpipe.pipeline.report import Report
from bagpipe.training.part import LoopPart, LoopRun
from bagpipe.training.progress import Progress
from bagpipe.training.rows import EvaluationRows

__all__ = ["Totals"]


class Totals(LoopPart):
    """Counts of one run. Listed behind the parts whose results it counts.

    Args:
        rows: counts rows read and written.
        loss_sums: sums of losses by counter.
        loss_scale: of the batch that comes next.
    """

    name = "totals"

    def __init__(
        self,
        rows: EvaluationRows,
        loss_sums: Callable[[], Mapping[str, Tensor]],
        loss_scale: Callable[[], float] = lambda: 1,
    ) -> None:
        self._rows = rows
        self._loss_sums = loss_sums
        self._loss_scale = loss_scale
        self._run: LoopRun
        self._waits: tuple[str, ...] = ()
        self.num_batches = 0

    def start(self, run: LoopRun) -> None:
        self._run = run
        self._waits = tuple(op for part in run.parts for op in part.row_waits)
        self.num_batches = run.first_batch
        self._samples: int = run.carried.get("samples", 0)
        self._skipped: int = run.carried.get("skipped_batches", 0)
        self._rows_unique = self._rows_inserted = self._rows_found = 0
        self._share: float | None = None
        self._report: Report | None = None

    def finish_batch(self, b: int) -> None:
        batch = self._run.in_flight[b]
        planned = batch.rank_batch
        self.num_batches += 1
        if batch.is_skipped:
            self._skipped += 1
        else:
            self._samples += planned.batch.num_examples
        # With several ranks, each counts the rows it owns, so that their sum counts a row once.
        self._rows_unique += len(planned.consumer.unique if planned.exchange is None else planned.exchange.owned)
        self._rows_inserted += len(planned.owner.fetch)
        self._rows_found += batch.rows_found
        share = (planned.batch.reader_state or {}).get("share")
        self._share = share if isinstance(share, float) else None

    def counters(self) -> Mapping[str, Any]:
        return {"samples": self._samples, "skipped_batches": self._skipped}

    def progress(self) -> Progress:
        """The totals so far. Any thread may ask. The lanes of a run that has ended are those when it was last asked."""
        if self._run.runner is not None:
            seen = self._run.runner.snapshot()
            known = dict(seen.lanes)
            for name, more in (item for part in self._run.parts for item in part.lane_reports().items()):
                known[name] = known[name] + more if name in known else more
            self._report = replace(seen, lanes=known)
        report = self._report
        lanes = [] if report is None else [lane for name, lane in report.lanes.items() if name.startswith("compute")]
        first, *others = self._loss_sums().values()
        loss_sum = first.clone()
        for other in others:
            loss_sum += other
        return Progress(
            steps=self.num_batches,
            samples=self._samples,
            loss_sum=loss_sum,
            rows_unique=self._rows_unique,
            rows_inserted=self._rows_inserted,
            rows_found=self._rows_found,
            rows_fetched=self._rows.rows_fetched,
            rows_written=self._rows.rows_written,
            rows_deleted=self._rows.rows_deleted,
            evictions_waiting=self._rows.evictions_waiting,
            elapsed_s=report.wall_s if report is not None else 0.0,
            exposed_s=sum(lane.waits_s.get(op, 0.0) for lane in lanes for op in self._waits),
            skipped_batches=self._skipped,
            loss_scale=self._loss_scale(),
            share=self._share,
            lanes={} if report is None else report.lanes,
        )
