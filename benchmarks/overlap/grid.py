"""A workload in direct mode and over a grid of caches, repeated, with compute-only runs in between.

compute ─ trial ─ compute ─ trial ─ … ─ compute      baseline of a trial: the two compute-only runs around it

A trial that other jobs disturbed is repeated a few times; the least disturbed one is kept.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bagpipe.errors import JobError
from benchmarks.harness.processor_use import MAX_OTHER_CORES, ProcessorUse
from benchmarks.harness.shaped_link import ShapedServer
from benchmarks.overlap.resident import ResidentModel
from benchmarks.overlap.trial import DRAIN_STEPS, Trial, run_trial
from benchmarks.overlap.workload import TOTAL_ROWS, Workload, schema_toml

__all__ = ["Cell", "Record", "check_same_work", "run_workload"]

#: Batches that the compute-only runs repeat.
_COMPUTE_BATCHES = 16
#: Steps of direct mode before it is measured: only the pipeline of batches fills up.
_DIRECT_WARMUP_STEPS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A cell of the grid. A cache share of 0 is direct mode."""

    cache_share: float
    lookahead: int

    @property
    def cache_rows(self) -> int:
        return int(self.cache_share * TOTAL_ROWS)

    @property
    def text(self) -> str:
        return f"cache {self.cache_share:.0%}, lookahead {self.lookahead}" if self.cache_share else "direct mode"


DIRECT = Cell(cache_share=0.0, lookahead=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One trial, and the compute-only runs around it.

    Attributes:
        workload, repeat, cell: names and number.
        compute_s: median step of the compute-only runs before and after.
        tries: trials until one was undisturbed, or until the limit.
        trial: the least disturbed of them.
    """

    workload: str
    repeat: int
    cell: Cell
    compute_s: float
    tries: int
    trial: Trial

    @property
    def is_quiet(self) -> bool:
        """Whether no other job disturbed the trial."""
        return self.trial.other_cores <= MAX_OTHER_CORES

    @property
    def step_p50_s(self) -> float:
        return statistics.median(self.trial.step_s)

    @property
    def step_p90_s(self) -> float:
        return statistics.quantiles(self.trial.step_s, n=10)[-1]


def run_workload(
    workload: Workload,
    *,
    lookaheads: Sequence[int],
    repeats: int,
    tries: int,
    told: Callable[[Record, str], None],
    trace_dir: Path | None = None,
) -> list[Record]:
    """Measure one workload.

    Args:
        workload: what to train.
        lookaheads: columns of the grid.
        repeats: times the whole grid is measured.
        tries: trials of a cell, at most, until one is undisturbed.
        told: gets every record and a line that describes it.
        trace_dir: write a trace of every trial here.
    """
    cells = [DIRECT, *(Cell(cache_share=s, lookahead=n) for s in workload.cache_shares for n in lookaheads)]
    records: list[Record] = []
    with tempfile.TemporaryDirectory(prefix="bagpipe-overlap-") as folder, ShapedServer() as server:
        schema_path = Path(folder) / "schema.toml"
        most_steps = workload.warmup_steps + workload.measured_steps + DRAIN_STEPS + max(lookaheads)
        schema_path.write_text(schema_toml(workload.batch_size * most_steps))
        bench = _Bench(workload, server, str(schema_path), tries, trace_dir)
        for repeat in range(repeats):
            for cell in cells:
                record = bench.measure(cell, repeat)
                records.append(record)
                told(record, _line(record))
    return records


class _Bench:
    """One workload's resident model, and its server."""

    def __init__(
        self, workload: Workload, server: ShapedServer, schema_path: str, tries: int, trace_dir: Path | None
    ) -> None:
        self._tries = tries
        self._workload = workload
        self._server = server
        self._schema_path = schema_path
        self._trace_dir = trace_dir
        first = workload.warmup_steps
        self._resident = ResidentModel(
            workload.config(url="", schema_path=schema_path, cache_rows=TOTAL_ROWS, lookahead=1, steps=0),
            num_slots=TOTAL_ROWS,
            batches=range(first, first + _COMPUTE_BATCHES),
        )
        self._resident.run()  # warms up allocators and processor caches

    def measure(self, cell: Cell, repeat: int) -> Record:
        """A trial of the cell between two compute-only runs."""
        compute_before = self._compute()
        best: Trial | None = None
        tries = 0
        while tries < self._tries and (best is None or best.other_cores > MAX_OTHER_CORES):
            tries += 1
            trial = self._trial(cell)
            if best is None or trial.other_cores < best.other_cores:
                best = trial
        assert best is not None, "at least one try is made"
        return Record(
            workload=self._workload.name,
            repeat=repeat,
            cell=cell,
            compute_s=statistics.median([*compute_before, *self._compute()]),
            tries=tries,
            trial=best,
        )

    def _compute(self) -> list[float]:
        """Step times of an undisturbed compute-only run, or of the least disturbed of a few."""
        best: tuple[float, list[float]] | None = None
        for _ in range(self._tries):
            before = ProcessorUse.now([os.getpid(), self._server.process_id])
            times_s = list(self._resident.run())
            _, other_cores = ProcessorUse.now([os.getpid(), self._server.process_id]).cores_since(before)
            if best is None or other_cores < best[0]:
                best = (other_cores, times_s)
            if other_cores <= MAX_OTHER_CORES:
                break
        assert best is not None, "at least one try is made"
        return best[1]

    def _trial(self, cell: Cell) -> Trial:
        workload = self._workload
        direct = cell == DIRECT
        warmup_steps = _DIRECT_WARMUP_STEPS if direct else workload.warmup_steps
        measured_steps = workload.direct_steps if direct else workload.measured_steps
        config = workload.config(
            url=self._server.url,
            schema_path=self._schema_path,
            cache_rows=cell.cache_rows,
            lookahead=cell.lookahead,
            steps=warmup_steps + measured_steps + DRAIN_STEPS,
        )
        trace_path = ""
        if self._trace_dir is not None:
            trace_path = str(self._trace_dir / f"{workload.name}-{cell.cache_rows}-{cell.lookahead}.json")
        return run_trial(self._server, config, warmup_steps=warmup_steps, trace_path=trace_path)


def check_same_work(records: Sequence[Record]) -> None:
    """Check that all runs of a workload computed the same, whatever their cache.

    Raises:
        JobError: losses differ by more than rounding.
    """
    losses = sorted(record.trial.loss for record in records)
    if losses[-1] - losses[0] > 1e-6 * abs(losses[0]):
        raise JobError(f"{records[0].workload}: losses of the first steps range from {losses[0]} to {losses[-1]}")


def _line(record: Record) -> str:
    trial = record.trial
    return (
        f"{record.workload} #{record.repeat} {record.cell.text:28s} step p50 {record.step_p50_s * 1e3:6.1f} ms, "
        f"p90 {record.step_p90_s * 1e3:6.1f}, compute only {record.compute_s * 1e3:6.1f}, "
        f"exposed {trial.exposed_s * 1e3:5.1f}, hits {trial.hit_rate:6.1%}, "
        f"link {trial.received_bytes / 1e6:5.2f} + {trial.sent_bytes / 1e6:5.2f} MB, "
        f"cores {trial.own_cores:.2f} + {trial.other_cores:.2f} others, tries {record.tries}"
    )
