"""Result of a run, as a JSON object and as text lines."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bagpipe.util.outputs import write_json
from trainer.metrics import METRICS, left_out_lines

__all__ = ["Result"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Result of a run.

    Attributes:
        steps, samples: training batches and examples of the whole job.
        seconds: wall time of training in this process, including the final write-back.
        samples_per_s: examples trained in this process / seconds.
        loss: mean training loss of the whole job; None without steps or if it is not finite.
        auc, ne, logloss, calibration, gauc: of the held-out examples (`trainer.metrics.Quality`); None without a value.
        gauc_groups, gauc_groups_left_out: groups with both classes, and with one; None without `gauc`.
        metrics_left_out: why a metric of the held-out examples has no value, by its field; empty without evaluation.
        tasks: with several labels, the metrics of each one and its `metrics_left_out`, by its name; the fields above
            are then of the first label. Empty with one label.
        rows_unique: unique rows, summed over batches.
        rows_new: those of them that neither the cache nor the store had when their batch came.
        rows_fetched: rows asked of the store. rows_written: rows written to it. rows_deleted: rows that expired.
        evictions_waiting: rows that left the cache right after the batch that used them, so that the next forward
            waited for its update. In direct mode every row does.
        cache_rows: rows per rank for which the cache had slots; with `cache.rows` auto those that the fullest has grown
            to, spare ones counted as far as they were used. 0: direct mode.
        hit_rate: share of unique rows that were in the cache at the start of their batch.
        exposed_embedding_s: time the compute lane waited for rows.
        step_s_p50: median time between the ends of consecutive batches.
        planned_step_s: time of a step of the dense part that `pipeline.plan` predicts; None: no plan, or none in it.
        dense_digest, embedding_digest: see `bagpipe.training.digest`.
        peak_rss_bytes: peak resident set size of the trainer process.
        skipped_rows: malformed rows skipped (``data.bad_rows = skip``).
        skipped_batches: batches of the whole job skipped because of a loss or gradient that is not finite.
        loss_scale: final loss scale.
        resumed_from: step of the checkpoint the job resumed from; None: no checkpoint.
        checkpoints: checkpoints written by this process.
        checkpoint_stall_s: time training waited for checkpoints.
        stopped: the run was interrupted and stopped cleanly.
        evaluations: step and metrics of every evaluation of all held-out examples, or of the first `eval.batches`.
        best_step: step of the best evaluation; None: there is none.
        early_stopped: training ended because patience ran out.
        continued: training started from another job's rows (``store.existing = rows-only``).
        test: step and metrics of the best model, if it is kept, or else of the last one on `data.test_path`; None
            without it, or if the job was interrupted.
        verified: `bagpipe.training.verification.Verified` of the first batches (`run.verify`); None: not compared.
        started_from: what the job took from other weights (`checkpoint.start_from`); None: from initial values.
    """

    steps: int
    samples: int
    seconds: float
    samples_per_s: float
    loss: float | None
    auc: float | None
    ne: float | None
    logloss: float | None
    calibration: float | None
    gauc: float | None
    gauc_groups: int | None
    gauc_groups_left_out: int | None
    metrics_left_out: Mapping[str, str]
    tasks: Mapping[str, Mapping[str, Any]]
    rows_unique: int
    rows_new: int
    rows_fetched: int
    rows_written: int
    evictions_waiting: int
    cache_rows: int
    hit_rate: float
    exposed_embedding_s: float
    step_s_p50: float | None
    planned_step_s: float | None
    dense_digest: str
    embedding_digest: str | None
    peak_rss_bytes: int
    skipped_rows: int
    skipped_batches: int
    loss_scale: float
    resumed_from: int | None
    checkpoints: int
    checkpoint_stall_s: float
    stopped: bool
    continued: bool
    evaluations: list[dict[str, Any]]
    best_step: int | None
    early_stopped: bool
    started_from: Mapping[str, Any] | None
    test: Mapping[str, Any] | None
    verified: Mapping[str, Any] | None
    rows_deleted: int = 0

    def write(self, path: str) -> None:
        """Write the JSON object atomically."""
        write_json(path, dataclasses.asdict(self))

    def lines(self) -> list[str]:
        """Text lines for the terminal."""
        loss = "n/a" if self.loss is None else f"{self.loss:.5f}"
        p50 = "n/a" if self.step_s_p50 is None else f"{self.step_s_p50 * 1e3:.2f} ms"
        own = {name: getattr(self, name) for name in METRICS}
        metrics = [] if self.tasks else _metric_words(own, self.metrics_left_out)
        notes = [] if self.tasks else left_out_lines(self.metrics_left_out)
        for label, found in self.tasks.items():
            notes.append(f"{label}: " + "   ".join(_metric_words(found, found["metrics_left_out"])))
            notes += [f"{label}: {line}" for line in left_out_lines(found["metrics_left_out"])]
        if self.stopped:
            notes.append("the run was interrupted: training or evaluation may be incomplete")
        if self.evaluations:
            best = "none is the best" if self.best_step is None else f"the best one at step {self.best_step}"
            notes.append(f"{len(self.evaluations)} evaluations, {best}")
        if self.test is not None:
            for label, found in (self.test["tasks"] or {"": self.test}).items():
                words = "   ".join(_metric_words(found, found["metrics_left_out"]))
                notes.append(f"test{label and f' of {label}'}, of the model of step {self.test['step']}: {words}")
        if self.planned_step_s is not None:
            planned_s, step_s = self.planned_step_s, self.step_s_p50
            ratio = "" if step_s is None else f", the whole step took {step_s / planned_s:.2f} times that"
            notes.append(f"the plan predicted {planned_s * 1e3:.2f} ms for the dense part of a step{ratio}")
        if self.early_stopped:
            notes.append("training ended early: evaluations did not get better any more (eval.patience)")
        if self.started_from is not None:
            notes.append(f"the job started from {self.started_from['source']} (checkpoint.start_from)")
        if self.resumed_from is not None:
            notes.append(f"resumed from the checkpoint at step {self.resumed_from}")
        if self.checkpoints:
            notes.append(f"{self.checkpoints} checkpoints written, training waited {self.checkpoint_stall_s:.2f} s")
        if self.skipped_batches:
            notes.append(
                f"{self.skipped_batches} batches were skipped: a loss or gradient was not finite "
                f"(loss scale at the end: {self.loss_scale})"
            )
        if self.continued:
            notes.append(
                "training started from another job's rows, with a fresh dense part (store.existing = rows-only)"
            )
        if self.rows_deleted:
            notes.append(f"{self.rows_deleted} expired rows were deleted")
        if self.skipped_rows:
            notes.append(f"{self.skipped_rows} malformed rows were skipped")
        return [
            f"{self.steps} steps, {self.samples} samples in {self.seconds:.2f} s ({self.samples_per_s:.0f} samples/s)",
            "   ".join([f"loss {loss}", *metrics, f"step p50 {p50}"]),
            f"rows: {self.rows_unique} used, {self.hit_rate:.1%} from the cache, {self._share_found:.1%} from the "
            f"store, {self._share_new:.1%} new   {self.rows_fetched} fetched, {self.rows_written} written   "
            f"exposed {self.exposed_embedding_s:.2f} s",
            f"dense digest     {self.dense_digest}",
            f"embedding digest {self.embedding_digest or 'not computed (run.digest = false)'}",
            *notes,
        ]

    @property
    def _share_new(self) -> float:
        return self.rows_new / self.rows_unique if self.rows_unique else 0.0

    @property
    def _share_found(self) -> float:
        return max(0.0, 1.0 - self.hit_rate - self._share_new) if self.rows_unique else 0.0


def _metric_words(values: Mapping[str, Any], left_out: Mapping[str, str]) -> list[str]:
    """Title and value of each metric. Those of groups are shown if they were asked for."""
    return [
        f"{metric.title} {'n/a' if values[name] is None else format(values[name], '.5f')}"
        for name, metric in METRICS.items()
        if not metric.needs_groups or values[name] is not None or name in left_out
    ]
